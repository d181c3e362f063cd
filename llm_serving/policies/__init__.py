"""The scheduling policies (``scheduler_config.policy``). A policy decides which kind of step comes next.

A policy chooses whether prompts or decoding sequences go first, or whether a step has both. The composers in
``scheduler`` then choose the sequences of the step. The tokens of a request do not depend on the policy.

To add a policy, add a subclass of ``SchedulingPolicy`` in its own file. Then add a line to ``setup`` and a member to
``Policy`` in ``scheduler/limits.py``. The agent's queue (``agent/task_queue.py``) must run steps in the order that the
policy expects.
"""
