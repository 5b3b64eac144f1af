"""Tables of pyarrow, which the real module wraps."""

import pyarrow as pa

concat_tables = pa.concat_tables


class MemoryMappedTable:
    @staticmethod
    def from_file(file: str) -> pa.Table:
        return pa.ipc.open_stream(pa.memory_map(file)).read_all()


def table_cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    return table
