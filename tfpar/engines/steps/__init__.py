"""The inner loop: many steps per call, with the next batch copied to the devices ahead."""
