"""Starting jobs: on this machine, and later on clusters."""
