"""What is said: the messages, their framing, and the state machines of node and hub, without a socket or a clock."""
