"""Data parallelism: several replicas of the model behind one queue. Like the scheduler, this package has no clock,
input or output.

requests ──▶ Router: one queue with limits and order ──▶ replica 0: Scheduler, KV cache ──▶ its agents
                     (priority, fairness, deadlines) ──▶ replica 1: Scheduler, KV cache ──▶ its agents
"""
