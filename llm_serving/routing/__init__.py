"""Several replicas of the model behind one queue. Pure, like the scheduler: no clock, no IO.

requests ──▶ Router: one queue with limits and order ──▶ replica 0: Scheduler, KV cache ──▶ its agents
                     (priority, fairness, deadlines) ──▶ replica 1: Scheduler, KV cache ──▶ its agents
"""
