"""Sampling that depends on nothing but what is asked for."""

import hashlib

import torch


def plain_inputs(tokens):
    """What the model takes."""
    return {"input_ids": torch.tensor([tokens])}


@torch.no_grad()
def sample(model, prompt, limit, key, inputs_of=plain_inputs, never=()):
    """Tokens and their log-probs, at temperature 1; the same for the same `key`, and none of those in `never`."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7]))
    tokens, log_probs = [], []
    while len(tokens) < limit:
        log_probs_V = torch.log_softmax(model(**inputs_of(prompt + tokens)).logits[0, -1], -1)
        chances_V = log_probs_V.exp()
        chances_V[list(never)] = 0
        tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
        log_probs.append(float(log_probs_V[tokens[-1]]))
        if tokens[-1] == model.config.get_text_config().eos_token_id:
            break
    return tokens, log_probs
