"""What threads of a node and of a broker share: mailboxes, effects in their order, events, waits with a bound."""
