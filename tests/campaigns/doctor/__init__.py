"""`recipes doctor` against faults that are made for real: each is named, and its fix mends it."""
