"""Data parallelism: a router gives the requests of one queue to several replicas of the model. Like the scheduler, the
router has no clock, no input and no output.

requests ──▶ Router: one queue with limits and order ──▶ replica 0: Scheduler, KV cache ──▶ its agents
                     (priority, fairness, deadlines) ──▶ replica 1: Scheduler, KV cache ──▶ its agents
"""
