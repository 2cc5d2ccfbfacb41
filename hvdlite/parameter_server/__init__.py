"""The parameter server: asynchronous training, beside the engine and without a world of ranks.

The first ranks of the job are *servers*, the others *workers*. A worker registers the *collection*,
the named tensors of its model, and each server holds some of them. A worker *pushes* gradients,
which a server applies at once, and *pulls* values. The number of pushes that a server has applied
is its *version*; the *age* of a push is the number of versions that its worker had not seen.

This package moves bytes and imports no framework. A request goes from `client` over `wire` to
`server` (one thread per worker), and to the `collection`, which bounds how far a worker may be
ahead. An adapter gives a server the storage (`tensors`), which holds the values and applies
gradients, and on a worker passes memory to the client. `checkpoint` is the file of a server;
`group` is what users see.
"""
