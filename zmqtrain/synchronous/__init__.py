"""What carries gradients when nodes train in lockstep: a communicator, or a parameter server."""
