"""Exchange of gradients in synchronous training: over a communicator, or a parameter server."""
