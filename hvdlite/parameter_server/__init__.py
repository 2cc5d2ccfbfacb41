"""The parameter server: asynchronous training, beside the engine and without a world of ranks.

The first ranks of the job are *servers*, the others *workers*. A *collection* is a list of named
tensors that a worker registers: the parameters of a model. `placement`
cuts it into *parts*, whole tensors or rows of large ones; one server holds each part. A worker
*pushes* gradients, which a server applies at once, and *pulls* values. The number of pushes that a
server has applied to a collection is the *version* of the collection there; the *age* of a push is
the number of versions that its worker had not seen.

This package moves bytes and imports no framework. An adapter gives a server the `storage` of a
collection, which holds the values and applies gradients. On a worker, an adapter passes memory to
the `client`. The way of one request is `client`, `wire`, `session` (one thread per worker on a
server), `collection`, `storage`. `meeting` is how workers find servers, `clocks` bounds how far a
worker may be ahead, `checkpoint` is the file of a server and `saving` the thread that writes it;
`group` is what users see.
"""
