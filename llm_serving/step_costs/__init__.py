"""Learns how long steps take, from the times of completed steps.

``Rate`` is the mean time of a computed token or a moved block. ``StepCostModel`` predicts the time of a whole step.
"""
