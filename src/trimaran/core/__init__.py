"""The vocabulary of the engine; imports nothing from the other packages."""
