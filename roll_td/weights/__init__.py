"""Weight updates: `plan` says who sends what to whom, `update` does it."""
