"""What is trained on: verifiable problems with a reward that costs nothing to compute.

`rollwise.tasks.arithmetic` is embedded: problems, tokenizer, reward and a small pretrained model come with the
package, so that a whole GRPO run fits into a minute or two on two CPU cores, without a network.
`rollwise.tasks.pretrain` makes that model again from a seed.

Environments in which a model acts over several turns need `pip install 'rollwise[envs]'`. `rollwise.tasks.environment`
has the one format of all of them, `rollwise.tasks.levels` their names and data sets, `rollwise.tasks.questions` those
that come from data, and `rollwise.tasks.batch` plays many together.
"""
