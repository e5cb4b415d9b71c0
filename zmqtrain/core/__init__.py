"""The vocabulary and the interfaces that every other folder uses."""
