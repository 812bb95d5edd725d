"""What tests of the MLX backend run in child processes."""


def allocate_too_much(send):
    import mlx.core as mx

    mx.eval(mx.zeros((2**30, 2**20)))
