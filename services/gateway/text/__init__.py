"""Text and tokens: tokenizers, chat templates, detokenization, and the processes in which slow text work can be killed.

Called while a request is read and while its answer is written. Knows checkpoints, not the cluster.
"""
