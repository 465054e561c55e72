"""Data for the driver: rows of files, tokenised, in an order that follows from seed and step."""
