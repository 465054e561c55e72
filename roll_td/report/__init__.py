"""`roll-td report`: a page about a run, from what it left in its directory. No torch here."""
