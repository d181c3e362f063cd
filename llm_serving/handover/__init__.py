"""Separate prefill and decode: the pool of handed blocks, their headers, the learned threshold, and transports."""
