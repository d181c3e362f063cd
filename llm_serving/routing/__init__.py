"""Several replicas of the model behind one queue: who is served where. Pure, like the scheduler: no clock, no IO.

requests ──▶ Router: one bounded queue, one order ──▶ replica 0: Scheduler, KV cache ──▶ its agents
                     (priority, fairness, deadlines) ──▶ replica 1: Scheduler, KV cache ──▶ its agents
"""
