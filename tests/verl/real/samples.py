"""Sampling that depends on nothing but what is asked for."""

import hashlib

import torch


@torch.no_grad()
def sample(model, prompt, limit, key):
    """Tokens and their log-probs, at temperature 1; the same for the same `key`."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7]))
    tokens, log_probs = [], []
    while len(tokens) < limit:
        log_probs_V = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, -1], -1)
        tokens.append(int(torch.multinomial(log_probs_V.exp(), 1, generator=generator)))
        log_probs.append(float(log_probs_V[tokens[-1]]))
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens, log_probs
