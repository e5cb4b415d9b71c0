"""The live page of a run in a browser: what it shows, where that comes from, and the server. It changes nothing."""
