"""A large embedding table, sharded by rows over all devices, and an optimizer that changes only the rows of a batch.

Each device finds the unique ids of its part of the batch, and asks the devices that store these rows (all-to-all). The
rows come back, the model reads them, and their gradients take the same way. So no array has the size of the table but
the table itself, and no device gathers it.

Rows are distributed in turn: device `d` of `n` stores the rows `d`, `d + n`, `d + 2 n`, ... Frequent ids are often
neighbours, and this spreads them.

Suffixes: N ids of a device, M devices, C slots that a device has for each other one, D width of a row.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.sharding.collectives import Axes, all_reduce


class TableState(NamedTuple):
    """A table and the state of its optimizer, both sharded by rows.

    Attributes:
      rows: the table, in the order in which devices store it [rows, D]. `EmbeddingTable.to_dense` has the order of ids.
      sums: for each row the sum of the mean squares of its gradients [rows].
    """

    rows: jax.Array
    sums: jax.Array


class Lookup(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
      slots: for each id the row of the device's part of `fetch`'s rows, in the shape of the ids.
      requests: for each slot of each device that asks, which row of this device is asked for; -1 means none [M * M, C].
      overflow: number of unique ids that have no slot.
      unknown: number of ids that the table does not have.
    """

    slots: jax.Array
    requests: jax.Array
    overflow: jax.Array
    unknown: jax.Array


class TableBytes(NamedTuple):
    """Bytes of one device.

    Attributes:
      table: of the rows that it stores.
      optimizer: of the optimizer's sums of these rows.
      fetch: that it sends in `fetch`: ids, and rows for other devices.
      update: that it sends in `update`: gradients.
    """

    table: int
    optimizer: int
    fetch: int
    update: int


@dataclass(frozen=True)
class EmbeddingTable:
    """The sizes of a table and the devices that store it. The arrays are in a `TableState`.

    Attributes:
      num_rows: number of ids.
      width: D.
      mesh: devices. The table is split over all of them, and so are the ids of a batch along their first dimension.
      slots: C: rows that a device can ask each device for. The unique ids of a device must fit, and those that one
        device stores: without skew about `N / M`, in the worst case N. With C = N nothing ever overflows.
      dtype: dtype of the rows.
    """

    num_rows: int
    width: int
    mesh: Mesh
    slots: int
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self) -> None:
        for name in ("num_rows", "width", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a size. Use 1 or more.")
        if self.rows_per_device * self.devices >= 2**31:
            raise ConfigError(f"num_rows={self.num_rows} exceeds ids of 32 bits. Split the table into several.")

    @property
    def axes(self) -> Axes:
        """All axes of the mesh."""
        return tuple(self.mesh.axis_names)

    @property
    def devices(self) -> int:
        """M."""
        return self.mesh.size

    @property
    def rows_per_device(self) -> int:
        """Rows that a device stores. The last ones may have no ids."""
        return -(-self.num_rows // self.devices)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of tables, of sums and of batches of ids: the first dimension over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes))

    def init(self, key: jax.Array, scale: float = 0.01) -> TableState:
        """Returns rows with normally distributed values and sums of zero. Each device draws its own rows.

        Values do not depend on the mesh: a row's key is folded from its id.
        """

        def draw(key: jax.Array) -> jax.Array:
            ids = self._ids()
            keys = jax.vmap(partial(jax.random.fold_in, key))(ids)
            return scale * jax.vmap(lambda k: jax.random.normal(k, (self.width,), self.dtype))(keys)

        rows = jax.jit(draw, out_shardings=self.sharding)(key)
        return TableState(rows, self._zero_sums())

    def from_dense(self, values: np.ndarray | jax.Array) -> TableState:
        """Returns the state that begins with the rows of a table in the order of ids [num_rows, D]."""
        if values.shape != (self.num_rows, self.width):
            raise ConfigError(
                f"the values have the shape {list(values.shape)}, but the table is {[self.num_rows, self.width]}. "
                f"Give a row for each id."
            )
        padding = self.rows_per_device * self.devices - self.num_rows
        padded = np.pad(np.asarray(values), [(0, padding), (0, 0)])
        stored = padded.reshape(self.rows_per_device, self.devices, self.width).swapaxes(0, 1)
        rows = jax.device_put(stored.reshape(-1, self.width).astype(self.dtype), self.sharding)
        return TableState(rows, self._zero_sums())

    def to_dense(self, state: TableState) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows [num_rows, D] and the sums [num_rows] in the order of ids, on the host."""
        rows = np.asarray(state.rows).reshape(self.devices, self.rows_per_device, self.width).swapaxes(0, 1)
        sums = np.asarray(state.sums).reshape(self.devices, self.rows_per_device).T
        return rows.reshape(-1, self.width)[: self.num_rows], sums.reshape(-1)[: self.num_rows]

    def fetch(self, state: TableState, ids: jax.Array) -> tuple[jax.Array, Lookup]:
        """Returns the rows of a batch's ids, each once for each device, and where each id's row is.

        Differentiate your loss by the rows, then call `update` with the gradient. If ids did not fit the slots, or the
        table does not have them, all rows are NaN, and so is every loss: `check` says why.

        Args:
          ids: integers [B, ...]; the devices must divide B.
        """
        if ids.ndim < 1 or ids.shape[0] % self.devices or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigError(
                f"the ids are {ids.dtype}{list(ids.shape)}, but {plural(self.devices, 'device')} split integers along "
                f"the first dimension. Use a batch that they divide."
            )
        split = PartitionSpec(self.axes)
        found = Lookup(split, split, PartitionSpec(), PartitionSpec())  # type: ignore[arg-type]
        return jax.shard_map(self._fetch, mesh=self.mesh, in_specs=(split, split), out_specs=(split, found))(
            state.rows, ids
        )

    def vectors(self, rows: jax.Array, lookup: Lookup) -> jax.Array:
        """Returns the row of each id [B, ..., D]. Its gradient sums the gradients of equal ids of a device."""
        split = PartitionSpec(self.axes)
        take = jax.shard_map(lambda r, s: r[s], mesh=self.mesh, in_specs=(split, split), out_specs=split)
        return take(rows, lookup.slots)

    def update(
        self,
        state: TableState,
        lookup: Lookup,
        grads: jax.Array,
        learning_rate: float | jax.Array,
        epsilon: float = 1e-8,
    ) -> TableState:
        """Returns the state after a step of row-wise Adagrad, which reads and writes only the rows of the batch.

        The sum of a row grows by the mean square of its gradient. The row changes by the learning rate times the
        gradient, divided by the root of the sum plus epsilon. After an overflow or an unknown id nothing changes.

        Args:
          lookup: the result of `fetch`.
          grads: the gradient of the loss by the rows of `fetch`.
        """
        split = PartitionSpec(self.axes)
        failed = (lookup.overflow + lookup.unknown) > 0
        work = partial(self._update, epsilon=epsilon)
        specs = (split, split, split, split, PartitionSpec(), PartitionSpec())
        changed = jax.shard_map(work, mesh=self.mesh, in_specs=specs, out_specs=(split, split))
        rate = jnp.asarray(learning_rate, self.dtype)
        return TableState(*changed(state.rows, state.sums, lookup.requests, grads, rate, failed))

    def check(self, lookup: Lookup) -> None:
        """Raises a `ConfigError` if a lookup has failed. It waits for the lookup: call it when you read the loss."""
        if unknown := int(lookup.unknown):
            raise ConfigError(
                f"{plural(unknown, 'id is', 'ids are')} not in 0 to {self.num_rows - 1}. Correct the data."
            )
        if overflow := int(lookup.overflow):
            raise ConfigError(
                f"slots={self.slots} is too small: {plural(overflow, 'unique id has', 'unique ids have')} no slot. Use "
                f"more slots; as many as a device has ids are always enough."
            )

    def bytes(self, ids: int) -> TableBytes:
        """Returns the bytes of one device, for a batch with this many ids on each device.

        All-to-all sends a part of `1 / M` to each device. The part for the device itself is not counted.
        """
        slots = min(self.slots, ids)
        item = np.dtype(self.dtype).itemsize
        sent = (self.devices - 1) * slots
        rows = self.rows_per_device
        return TableBytes(
            table=rows * self.width * item,
            optimizer=rows * item,
            fetch=sent * (4 + self.width * item),
            update=sent * self.width * item,
        )

    def _ids(self) -> jax.Array:
        """Returns the id of each stored row; rows without an id have larger ones."""
        stored = jnp.arange(self.rows_per_device * self.devices, dtype=jnp.int32)
        return stored % self.rows_per_device * self.devices + stored // self.rows_per_device

    def _zero_sums(self) -> jax.Array:
        return jnp.zeros(self.rows_per_device * self.devices, self.dtype, device=self.sharding)

    def _fetch(self, rows: jax.Array, ids: jax.Array) -> tuple[jax.Array, Lookup]:
        """Returns this device's copies of the rows of its ids [M * C, D], and where they are."""
        per = self.rows_per_device
        flat = ids.reshape(-1).astype(jnp.int32)  # [N]
        slots = min(self.slots, flat.size)
        valid = (flat >= 0) & (flat < self.num_rows)
        none = self.devices * per
        stored = jnp.where(valid, flat % self.devices * per + flat // self.devices, none)
        unique, inverse = jnp.unique(stored, size=flat.size + 1, fill_value=none, return_inverse=True)
        owner = unique // per  # ascending, because `unique` is
        first = jnp.searchsorted(unique, jnp.arange(self.devices + 1) * per)
        place = jnp.arange(unique.size) - first[owner]
        fits = (unique < none) & (place < slots)
        slot = jnp.where(fits, owner * slots + place, self.devices * slots)
        asked = jnp.full(self.devices * slots, -1, jnp.int32).at[slot].set(unique % per, mode="drop")
        requests = self._exchange(asked.reshape(self.devices, slots))  # [M, C]: what each device asks of this one
        answers = jnp.where((requests >= 0)[..., None], rows[jnp.maximum(requests, 0)], 0)
        received = self._exchange(answers).reshape(-1, self.width)
        overflow = all_reduce(jnp.sum((unique < none) & ~fits), self.axes)
        unknown = all_reduce(jnp.sum(~valid), self.axes)
        received = jnp.where(overflow + unknown > 0, jnp.nan, received)
        places = jnp.minimum(slot[inverse.reshape(-1)], self.devices * slots - 1).reshape(ids.shape)
        return received, Lookup(places, requests, overflow, unknown)

    def _update(
        self,
        rows: jax.Array,
        sums: jax.Array,
        requests: jax.Array,
        grads: jax.Array,
        rate: jax.Array,
        failed: jax.Array,
        *,
        epsilon: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns this device's rows and sums after a step."""
        none = self.rows_per_device
        parts = self._exchange(grads.reshape(self.devices, -1, self.width)).reshape(-1, self.width)
        asked = requests.reshape(-1)
        asked = jnp.where((asked < 0) | failed, none, asked)
        unique, inverse = jnp.unique(asked, size=asked.size, fill_value=none, return_inverse=True)
        total = jax.ops.segment_sum(parts, inverse.reshape(-1), asked.size)  # several devices may have read a row
        sums_there = sums.at[unique].get(mode="fill", fill_value=1) + jnp.mean(total**2, -1)
        change = rate * total / (jnp.sqrt(sums_there) + epsilon)[:, None]
        return rows.at[unique].add(-change, mode="drop"), sums.at[unique].set(sums_there, mode="drop")

    def _exchange(self, x: jax.Array) -> jax.Array:
        """Returns what the devices have for this one [M, ...], from what this one has for each of them [M, ...]."""
        return jax.lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True)
