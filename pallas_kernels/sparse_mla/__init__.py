"""Attention of many heads over listed rows of up to two sets, one latent as key and value, one softmax over all."""
