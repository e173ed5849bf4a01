"""What a training loop needs: data, schedules, checkpoints that resume exactly, logs, LoRA. Applied from outside.

Start at ``loop.train``; ``examples/pretrain.py`` and ``examples/finetune.py`` call it.
"""
