"""What is done with contributions: what they weigh, and the outer optimizer that steps with them."""
