"""Checks that the agents compute correct results. An agent that fails one is restarted.

- ``results``: logits that are not finite, in the result of each step. The sampler marks them.
- The check of rows: the agents compute a sequence again, alone (``agent/model_runner.py``). ``StepSlots`` chooses it.
- ``canary``: a fixed prompt, whose tokens must stay the same.
"""
