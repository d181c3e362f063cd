"""Checks that the agents compute correct results. Agents that fail a check are restarted.

- ``results`` finds sequences whose logits are not finite, in the result of each step. The sampler marks them.
- ``canary`` runs a fixed prompt, whose tokens must stay the same.
- In the row check, the agents compute one sequence of a step a second time, alone, and compare the results
  (``agent/model_runner.py``). ``StepSlots`` chooses the sequence.
"""
