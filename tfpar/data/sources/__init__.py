"""Where examples come from: a module a source."""
