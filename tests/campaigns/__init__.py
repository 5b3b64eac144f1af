"""Long searches for what the tests did not think of. Each is a command of its own."""
