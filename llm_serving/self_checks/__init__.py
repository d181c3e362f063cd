"""Checks that the agents compute correct results. Agents that fail a check are restarted.

- ``results`` looks for sequences whose logits are not finite in the result of each step. The sampler has marked them.
- ``canary`` regularly runs a fixed prompt, whose output tokens must stay the same. ``canary_file`` stores them for
  later servers.
- In the row check, the agents compute one sequence of a step a second time without the other sequences, and compare the
  results (``agent/model_runner.py``). ``StepSlots`` chooses the sequence.
"""
