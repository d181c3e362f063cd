"""Data parallelism: several replicas of the model behind one queue. Like the scheduler, without clock and IO.

requests ──▶ Router: one queue with limits and order ──▶ replica 0: Scheduler, KV cache ──▶ its agents
                     (priority, fairness, deadlines) ──▶ replica 1: Scheduler, KV cache ──▶ its agents
"""
