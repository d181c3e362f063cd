"""What an agent needs when several agents share one model: its part, the exchange and the last tokens."""
