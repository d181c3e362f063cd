"""Separate prefill and decode: prefill replicas hand the KV blocks of a prompt over to decode replicas. The package has
the pool of these blocks, their headers, their transports, and the rule that chooses the prompts to hand over."""
