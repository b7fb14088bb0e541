"""What the `rollwise` command does, one module per concept.

`app` names the commands; `train` is the one to read first: arguments -> sources -> trainer -> summary, with `view`
as the progress display, `recorder` as the run's memory and `baseline` as the comparison with plain GRPO.
"""
