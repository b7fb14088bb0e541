"""What is trained on: verifiable problems with a reward that costs nothing to compute.

`rollwise.tasks.arithmetic` is embedded: problems, tokenizer, reward and a small pretrained model come with the
package, so that a whole GRPO run fits into a minute or two on two CPU cores, without a network.
`rollwise.tasks.pretrain` makes that model again from a seed.
"""
