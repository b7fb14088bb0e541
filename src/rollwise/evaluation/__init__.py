"""How good a model is: problems, samples, verdicts, and the figures made of them.

`measures` needs numpy alone; the other modules import what they need when it is called.
"""
