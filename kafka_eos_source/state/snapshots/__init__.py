"""Snapshots of shards on shared storage, from which a host without the state continues.

::

    <state.snapshot.location>/<application.id>/<store>/<shard>/
      files/<sha256>                              a file of RocksDB; several snapshots share it
      <changelog offset>-<topic>-<random>.json    a complete snapshot: which files it has

A snapshot is a cache of the changelog, never a source of truth. It holds the state of one committed batch,
and the changelog offset from which to continue. Losing snapshots, or not trusting one, costs time and no
records.

- `upload` freezes a shard's database and sends the copy to the storage, and removes old snapshots.
- `download` puts the newest snapshot that fits in the place of a missing store.
- `storage` names, reads and writes the files.
"""
