/*
 * Encodes and decodes Kafka's record batches, from and to Arrow buffers, without a Python object per record.
 *
 * This is a plain shared library. It does not include Python.h and links against nothing, so building it needs only
 * a C compiler. Callers must release Python's GIL, which ctypes does. The only state is the tables of checksums.
 *
 * kafka/kernel.py declares the signatures. If you change one, change KAFKA_EOS_KERNEL_VERSION here and VERSION in
 * native.py.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"

#define KAFKA_EOS_KERNEL_VERSION 11

EXPORT int32_t kafka_eos_kernel_version(void) { return KAFKA_EOS_KERNEL_VERSION; }

/* ---- reading ------------------------------------------------------------------------------------------- */

/* An Arrow array with values of variable size: a validity bit per entry, int32 offsets, bytes. */
typedef struct {
        part_t validity, offsets, data;
        int64_t nulls;
} column_t;

enum { WANT_KEY = 1, WANT_VALUE = 2, WANT_TIMESTAMP = 4, WANT_HEADERS = 8, WANT_RAW_NAMES = 16 };

/*
 * The records that one kafka_eos_decode returned. kafka.kernel._Block has the same layout up to `damaged`. Header
 * names are UTF-8, unless WANT_RAW_NAMES asks for their bytes.
 */
typedef struct {
        int64_t rows, entries;
        part_t offsets, partitions, topics, timestamps_ms, timestamp_types, header_counts;
        column_t keys, values, header_names, header_values;
        int64_t no_memory, damaged;
        int32_t wanted;
} block_t;

/* Appends entry number `index` to a column. The first entry also writes the initial offset. */
static int append_entry(column_t *column, int64_t index, const void *from, int64_t bytes) {
        static const uint8_t none = 0;
        int32_t offset            = (int32_t)column->data.bytes;

        if (index == 0 && !append(&column->offsets, &offset, sizeof(offset)))
                return 0;
        if ((index & 7) == 0 && !append(&column->validity, &none, 1))
                return 0;
        if (!from)
                column->nulls++;
        else if (append(&column->data, from, bytes))
                column->validity.at[index >> 3] |= (uint8_t)(1u << (index & 7));
        else
                return 0;
        offset = (int32_t)column->data.bytes;
        return append(&column->offsets, &offset, sizeof(offset));
}

/*
 * Blocks that were freed, whose buffers the next blocks use again. A buffer of megabytes that grows from nothing
 * costs more than copying messages into it: the system maps and clears each of its pages, and unmaps them when it
 * is freed. The pool keeps POOLED_BYTES at most. `is_locked` is held for a few instructions.
 */
enum { POOLED_BLOCKS = 4, POOLED_BYTES = 64 << 20, PARTS = 18 };

static struct {
        atomic_flag is_locked;
        int32_t count;
        int64_t bytes;
        block_t *blocks[POOLED_BLOCKS];
} pool = {.is_locked = ATOMIC_FLAG_INIT};

static void lock_pool(void) {
        while (atomic_flag_test_and_set_explicit(&pool.is_locked, memory_order_acquire))
                ;
}

static void unlock_pool(void) { atomic_flag_clear_explicit(&pool.is_locked, memory_order_release); }

/* Lists the buffers of a block. */
static void list_parts(block_t *block, part_t *parts[PARTS]) {
        column_t *columns[] = {&block->keys, &block->values, &block->header_names, &block->header_values};
        part_t *plain[]     = {&block->offsets,       &block->partitions,      &block->topics,
                               &block->timestamps_ms, &block->timestamp_types, &block->header_counts};
        size_t i;

        for (i = 0; i < 4; i++) {
                *parts++ = &columns[i]->validity;
                *parts++ = &columns[i]->offsets;
                *parts++ = &columns[i]->data;
        }
        memcpy(parts, plain, sizeof(plain));
}

static int64_t allocated_bytes(block_t *block) {
        part_t *parts[PARTS];
        int64_t bytes = 0;
        int i;

        list_parts(block, parts);
        for (i = 0; i < PARTS; i++)
                bytes += parts[i]->capacity;
        return bytes;
}

/* Returns an empty block, with buffers of an older one if there is one. Returns NULL if there is no memory. */
static block_t *new_block(void) {
        block_t *block = NULL;
        part_t *parts[PARTS], kept[PARTS];
        int i;

        lock_pool();
        if (pool.count) {
                block = pool.blocks[--pool.count];
                pool.bytes -= allocated_bytes(block);
        }
        unlock_pool();
        if (!block)
                return calloc(1, sizeof(*block));
        list_parts(block, parts);
        for (i = 0; i < PARTS; i++) {
                kept[i]       = *parts[i];
                kept[i].bytes = 0;
        }
        memset(block, 0, sizeof(*block));
        for (i = 0; i < PARTS; i++)
                *parts[i] = kept[i];
        return block;
}

/* Frees a block, or keeps it for the next one. */
EXPORT void kafka_eos_free(block_t *block) {
        int64_t bytes = allocated_bytes(block);
        part_t *parts[PARTS];
        int i, is_kept = 0;

        lock_pool();
        if (pool.count < POOLED_BLOCKS && pool.bytes + bytes <= POOLED_BYTES) {
                pool.blocks[pool.count++] = block;
                pool.bytes += bytes;
                is_kept = 1;
        }
        unlock_pool();
        if (is_kept)
                return;
        list_parts(block, parts);
        for (i = 0; i < PARTS; i++)
                free(parts[i]->at);
        free(block);
}

/* ---- writing ------------------------------------------------------------------------------------------- */

/* The same layout as kafka.kernel._HEADER. */
typedef struct {
        const char *name;
        int64_t name_bytes;
        const void *value; /* NULL = null */
        int64_t value_bytes;
} header_t;

/* Java's Utils.murmur2, the hash with which Kafka's own producers choose the partition of a key. */
static uint32_t murmur2(const uint8_t *at, size_t bytes) {
        const uint32_t m = 0x5bd1e995;
        uint32_t hash    = 0x9747b28c ^ (uint32_t)bytes;

        for (; bytes >= 4; at += 4, bytes -= 4) {
                uint32_t k = (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
                k *= m;
                k ^= k >> 24;
                hash = hash * m ^ k * m;
        }
        if (bytes > 2)
                hash ^= (uint32_t)at[2] << 16;
        if (bytes > 1)
                hash ^= (uint32_t)at[1] << 8;
        if (bytes > 0)
                hash = (hash ^ at[0]) * m;
        hash ^= hash >> 13;
        hash *= m;
        return hash ^ hash >> 15;
}

/* ---- record batches ------------------------------------------------------------------------------------ */

/*
 * CRC-32C (Castagnoli), as RFC 3720 defines it: with the CPU's instruction, or from tables, eight bytes a step.
 *
 * The CPU can begin an instruction each cycle, but the result of one takes three cycles. So three blocks of
 * CRC_BLOCK bytes are computed at the same time. `crc_shifts` then moves the checksum of one over the next: it is
 * the effect of that many zeros, by byte of the checksum.
 */
enum { CRC_BLOCK = 2048 };
static uint32_t crc_tables[8][256], crc_shifts[4][256];
/* of CRC-32, with which librdkafka's "consistent" partitioners hash keys */
static uint32_t crc32_table[256];
static int has_crc_instruction;

static uint32_t crc32c_tables(uint32_t crc, const uint8_t *at, size_t bytes);

/* Runs when the library is loaded. */
__attribute__((constructor)) static void prepare_crc(void) {
        static const uint8_t zeros[CRC_BLOCK];
        uint32_t i, j;

        for (i = 0; i < 256; i++) {
                uint32_t crc = i;
                for (j = 0; j < 8; j++)
                        crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
                crc_tables[0][i] = crc;
                for (crc = i, j = 0; j < 8; j++)
                        crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
                crc32_table[i] = crc;
        }
        for (i = 0; i < 256; i++)
                for (j = 1; j < 8; j++)
                        crc_tables[j][i] = crc_tables[j - 1][i] >> 8 ^ crc_tables[0][crc_tables[j - 1][i] & 0xFF];
        for (i = 0; i < 256; i++)
                for (j = 0; j < 4; j++)
                        crc_shifts[j][i] = crc32c_tables(i << 8 * j, zeros, CRC_BLOCK);
#if defined(__x86_64__)
        {
                unsigned int eax, ebx, ecx = 0, edx;
                has_crc_instruction = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_SSE4_2);
        }
#endif
}

static uint32_t crc32c_tables(uint32_t crc, const uint8_t *at, size_t bytes) {
        for (; bytes >= 8; at += 8, bytes -= 8) {
                uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                                      (uint32_t)at[3] << 24);
                crc = crc_tables[7][low & 0xFF] ^ crc_tables[6][low >> 8 & 0xFF] ^
                      crc_tables[5][low >> 16 & 0xFF] ^ crc_tables[4][low >> 24] ^ crc_tables[3][at[4]] ^
                      crc_tables[2][at[5]] ^ crc_tables[1][at[6]] ^ crc_tables[0][at[7]];
        }
        for (; bytes > 0; at++, bytes--)
                crc = crc >> 8 ^ crc_tables[0][(crc ^ *at) & 0xFF];
        return crc;
}

static uint32_t crc_shift(uint32_t crc) {
        return crc_shifts[0][crc & 0xFF] ^ crc_shifts[1][crc >> 8 & 0xFF] ^ crc_shifts[2][crc >> 16 & 0xFF] ^
               crc_shifts[3][crc >> 24];
}

/* Returns the checksum of some bytes that are followed by others, from both checksums and the number of the others. */
static uint32_t crc_joined(uint32_t crc, uint32_t others, int64_t bytes) {
        static const uint8_t zeros[CRC_BLOCK];

        for (; bytes >= CRC_BLOCK; bytes -= CRC_BLOCK)
                crc = crc_shift(crc);
        return crc32c_tables(crc, zeros, (size_t)bytes) ^ others;
}

#if defined(__x86_64__)
/* clang has counted the instruction for checksums separately since version 14 */
#if defined(__clang__) && __clang_major__ >= 14
#define SSE "sse4.2,crc32"
#else
#define SSE "sse4.2"
#endif

__attribute__((target(SSE))) static uint32_t crc32c_sse(uint32_t crc, const uint8_t *at, size_t bytes) {
        uint64_t wide = crc, word;

        for (; bytes >= 3 * CRC_BLOCK; at += 3 * CRC_BLOCK, bytes -= 3 * CRC_BLOCK) {
                uint64_t second = 0, third = 0, words[3];
                size_t i;
                for (i = 0; i < CRC_BLOCK; i += 8) {
                        memcpy(&words[0], at + i, 8);
                        memcpy(&words[1], at + CRC_BLOCK + i, 8);
                        memcpy(&words[2], at + 2 * CRC_BLOCK + i, 8);
                        wide   = __builtin_ia32_crc32di(wide, words[0]);
                        second = __builtin_ia32_crc32di(second, words[1]);
                        third  = __builtin_ia32_crc32di(third, words[2]);
                }
                wide = crc_shift(crc_shift((uint32_t)wide) ^ (uint32_t)second) ^ third;
        }
        for (; bytes >= 8; at += 8, bytes -= 8) {
                memcpy(&word, at, 8);
                wide = __builtin_ia32_crc32di(wide, word);
        }
        crc = (uint32_t)wide;
        for (; bytes > 0; at++, bytes--)
                crc = __builtin_ia32_crc32qi(crc, *at);
        return crc;
}
#endif

/* Returns the checksum of some bytes that follow others, whose checksum is `before`; 0 = none come before. */
EXPORT uint32_t kafka_eos_crc32c(uint32_t before, const uint8_t *at, int64_t bytes) {
#if defined(__x86_64__)
        if (has_crc_instruction)
                return ~crc32c_sse(~before, at, (size_t)bytes);
#endif
        return ~crc32c_tables(~before, at, (size_t)bytes);
}

static uint8_t *put_number(uint8_t *at, uint64_t number, int bytes) {
        while (bytes-- > 0)
                *at++ = (uint8_t)(number >> 8 * bytes);
        return at;
}

static uint64_t zigzag(int64_t number) { return (uint64_t)number << 1 ^ (uint64_t)(number >> 63); }

/* Returns the difference of two timestamps, which may wrap. */
static int64_t since(int64_t ms, int64_t first_ms) { return (int64_t)((uint64_t)ms - (uint64_t)first_ms); }

static int64_t varint_bytes(int64_t number) {
        uint64_t left = zigzag(number);
        int64_t bytes = 1;

        while (left >>= 7)
                bytes++;
        return bytes;
}

static uint8_t *put_varint(uint8_t *at, int64_t number) {
        uint64_t left = zigzag(number);

        for (; left >= 0x80; left >>= 7)
                *at++ = (uint8_t)(left | 0x80);
        *at++ = (uint8_t)left;
        return at;
}

/* Puts the length of some bytes, -1 if they are NULL, and the bytes. */
static uint8_t *put_bytes(uint8_t *at, const void *from, int64_t bytes) {
        at = put_varint(at, from ? bytes : -1);
        if (from && bytes > 0) {
                memcpy(at, from, (size_t)bytes);
                at += bytes;
        }
        return at;
}

static int64_t bytes_of(const void *from, int64_t bytes) {
        return varint_bytes(from ? bytes : -1) + (from ? bytes : 0);
}

/* The fields of a record batch, version 2 (org.apache.kafka.common.record.DefaultRecordBatch). */
enum {
        AT_LENGTH     = 8,
        AT_EPOCH      = 12, /* of the partition's leader */
        AT_MAGIC      = 16,
        AT_CRC        = 17,
        AT_ATTRIBUTES = 21,
        AT_LAST       = 23,
        AT_FIRST_MS   = 27,
        AT_MAX_MS     = 35,
        AT_PRODUCER   = 43,
        AT_COUNT      = 57,
        BATCH_HEADER  = 61
};

/*
 * Completes the header of a record batch with what its sender knows, its length and its checksum. The records, which
 * may be compressed, have `bytes` bytes. Until then, the header's checksum is that of the records, so they need not be
 * read. If they have changed since, the broker refuses the batch.
 */
EXPORT void kafka_eos_stamp(uint8_t *header, int64_t bytes, int64_t producer_id, int32_t epoch, int32_t sequence) {
        uint8_t *producer = header + AT_PRODUCER;
        uint32_t records  = (uint32_t)header[AT_CRC] << 24 | (uint32_t)header[AT_CRC + 1] << 16 |
                           (uint32_t)header[AT_CRC + 2] << 8 | header[AT_CRC + 3];
        uint32_t crc;

        put_number(header + AT_LENGTH, (uint64_t)(BATCH_HEADER + bytes - AT_EPOCH), 4);
        producer = put_number(producer, (uint64_t)producer_id, 8);
        producer = put_number(producer, (uint64_t)epoch, 2);
        put_number(producer, (uint64_t)sequence, 4);
        crc = kafka_eos_crc32c(0, header + AT_ATTRIBUTES, BATCH_HEADER - AT_ATTRIBUTES);
        put_number(header + AT_CRC, crc_joined(crc, records, bytes), 4);
}

/* An Arrow array of binary values, as kafka.kernel._Values describes it. `validity` NULL: no value is null. */
typedef struct {
        const uint8_t *validity;
        const int32_t *offsets;
        const uint8_t *data;
        int64_t first; /* bit of the first value in `validity` */
} values_t;

/* Rows of one Arrow batch, as kafka.kernel._Rows describes them. */
typedef struct {
        values_t keys, values;
        const int64_t *timestamps_ms; /* NULL or negative = the time of sending */
        const int64_t *header_starts; /* NULL = no row has headers */
        const int64_t *header_counts;
        const header_t *headers;
} rows_t;

/* Returns a value and its length; NULL if it is null. */
static const uint8_t *value_at(const values_t *values, int64_t row, int64_t *bytes) {
        static const uint8_t empty = 0;
        int64_t bit                = values->first + row;

        *bytes = 0;
        if (!values->offsets || (values->validity && !(values->validity[bit >> 3] >> (bit & 7) & 1)))
                return NULL;
        *bytes = values->offsets[row + 1] - values->offsets[row];
        return *bytes ? values->data + values->offsets[row] : &empty;
}

/* librdkafka's partitioners (rdkafka_msg.c), in the order of kafka.kernel.PARTITIONERS. */
enum {
        PLACE_RANDOM,
        PLACE_CONSISTENT,
        PLACE_CONSISTENT_RANDOM,
        PLACE_MURMUR2,
        PLACE_MURMUR2_RANDOM,
        PLACE_FNV1A,
        PLACE_FNV1A_RANDOM
};

/* zlib's CRC-32. */
static uint32_t crc32(const uint8_t *at, int64_t bytes) {
        uint32_t crc = 0xFFFFFFFF;

        for (; bytes > 0; at++, bytes--)
                crc = crc >> 8 ^ crc32_table[(crc ^ *at) & 0xFF];
        return ~crc;
}

/* FNV-1a with 32 bits, made positive as in Sarama, Go's client. */
static uint32_t fnv1a(const uint8_t *at, int64_t bytes) {
        uint32_t hash = 0x811C9DC5;

        for (; bytes > 0; at++, bytes--)
                hash = (hash ^ *at) * 0x01000193;
        return hash & 0x80000000 ? 0 - hash : hash;
}

/*
 * Sets the partition of each row that has none and whose key decides it; the caller distributes the others. Without a
 * key, only "consistent", "murmur2" and "fnv1a" decide: they take a null for an empty key.
 */
EXPORT void kafka_eos_place_rows(const rows_t *rows, int64_t count, int32_t *partitions, int32_t partition_count,
                                 int32_t partitioner) {
        int64_t row, bytes;

        for (row = 0; row < count && partitioner != PLACE_RANDOM; row++) {
                const uint8_t *key;
                uint32_t hash;
                if (partitions[row] >= 0)
                        continue;
                key = value_at(&rows->keys, row, &bytes);
                if (partitioner == PLACE_MURMUR2_RANDOM || partitioner == PLACE_MURMUR2) {
                        if (!key && partitioner == PLACE_MURMUR2_RANDOM)
                                continue;
                        hash = murmur2(key, (size_t)bytes) & 0x7fffffff;
                } else if (partitioner == PLACE_FNV1A_RANDOM || partitioner == PLACE_FNV1A) {
                        if (!key && partitioner == PLACE_FNV1A_RANDOM)
                                continue;
                        hash = fnv1a(key, bytes);
                } else {
                        if (bytes == 0 && partitioner == PLACE_CONSISTENT_RANDOM)
                                continue;
                        hash = crc32(key, bytes);
                }
                partitions[row] = (int32_t)(hash % (uint32_t)partition_count);
        }
}

/* Most bytes of a record's attributes, deltas and lengths, and of the lengths of one header. */
enum { FIELDS_BYTES = 40, HEADER_FIELDS_BYTES = 10 };

/* The number of a row among those of several batches. */
enum { ROW_BITS = 32 };

/*
 * Groups the rows of several batches by partition, in their order within each. `partitions` has the partition of each
 * row, which is below `most`.
 *
 * Sets `order` to the numbers of the rows, and for each partition: the number of its rows, where they end in `order`,
 * the bytes of their keys, values and headers, and the bytes that they have at most when they are encoded. Returns
 * the bytes of the largest row.
 */
EXPORT int64_t kafka_eos_group(const rows_t *batches, const int64_t *counts, int64_t batch_count,
                               const int32_t *partitions, int64_t most, int64_t *order, int64_t *lengths,
                               int64_t *ends, int64_t *bytes, int64_t *encoded) {
        const int32_t *partition = partitions;
        int64_t batch, row, j, sum = 0, largest = 0;

        memset(lengths, 0, (size_t)most * sizeof(*lengths));
        memset(bytes, 0, (size_t)most * sizeof(*bytes));
        memset(encoded, 0, (size_t)most * sizeof(*encoded));
        for (batch = 0; batch < batch_count; batch++)
                for (row = 0; row < counts[batch]; row++, partition++) {
                        const rows_t *rows = &batches[batch];
                        int64_t number     = rows->header_starts ? rows->header_counts[row] : 0;
                        int64_t size, value_bytes;
                        value_at(&rows->keys, row, &size);
                        value_at(&rows->values, row, &value_bytes);
                        size += value_bytes;
                        for (j = 0; j < number; j++) {
                                const header_t *header = &rows->headers[rows->header_starts[row] + j];
                                size += header->name_bytes + header->value_bytes;
                        }
                        lengths[*partition]++;
                        bytes[*partition] += size;
                        encoded[*partition] += size + FIELDS_BYTES + number * HEADER_FIELDS_BYTES;
                        if (size > largest)
                                largest = size;
                }
        for (row = 0; row < most; row++) {
                ends[row] = sum; /* where the next row goes, which the last loop moves to the end */
                sum += lengths[row];
        }
        partition = partitions;
        for (batch = 0; batch < batch_count; batch++)
                for (row = 0; row < counts[batch]; row++, partition++)
                        order[ends[*partition]++] = batch << ROW_BITS | row;
        return largest;
}

/*
 * Encodes the first of the rows that `order` lists as one record batch of up to `limit` bytes, but at least one
 * row, without compression. `now_ms` is the time of rows that have none.
 *
 * Returns the batch's bytes, and in `taken` the number of rows; 0 if not even one row fits into `capacity`.
 */
static int64_t encode(const rows_t *batches, const int64_t *order, int64_t count, int64_t now_ms, int32_t attributes,
                      int64_t limit, uint8_t *out, int64_t capacity, int64_t *taken) {
        int64_t first_ms = 0, max_ms = 0, index, j;
        uint8_t *at      = out + BATCH_HEADER;

        *taken = 0;
        if (capacity < BATCH_HEADER)
                return 0;
        for (index = 0; index < count; index++) {
                const rows_t *rows = &batches[order[index] >> ROW_BITS];
                int64_t row        = order[index] & (((int64_t)1 << ROW_BITS) - 1), key_bytes, value_bytes, bytes, total;
                int64_t ms     = rows->timestamps_ms && rows->timestamps_ms[row] >= 0 ? rows->timestamps_ms[row] : now_ms;
                int64_t number = rows->header_starts ? rows->header_counts[row] : 0;
                const header_t *header = number > 0 ? rows->headers + rows->header_starts[row] : NULL;
                const uint8_t *key     = value_at(&rows->keys, row, &key_bytes);
                const uint8_t *value   = value_at(&rows->values, row, &value_bytes);

                if (index == 0)
                        first_ms = max_ms = ms;
                bytes = 1 + varint_bytes(since(ms, first_ms)) + varint_bytes(index) + bytes_of(key, key_bytes) +
                        bytes_of(value, value_bytes) + varint_bytes(number);
                for (j = 0; j < number; j++)
                        bytes += bytes_of(header[j].name, header[j].name_bytes) +
                                 bytes_of(header[j].value, header[j].value_bytes);
                total = varint_bytes(bytes) + bytes;
                if (index > 0 && at - out + total > limit)
                        break;
                if (at - out + total > capacity) {
                        if (index == 0)
                                return 0;
                        break;
                }
                at    = put_varint(at, bytes);
                *at++ = 0; /* attributes */
                at    = put_varint(at, since(ms, first_ms));
                at    = put_varint(at, index);
                at    = put_bytes(at, key, key_bytes);
                at    = put_bytes(at, value, value_bytes);
                at    = put_varint(at, number);
                for (j = 0; j < number; j++) {
                        at = put_bytes(at, header[j].name, header[j].name_bytes);
                        at = put_bytes(at, header[j].value, header[j].value_bytes);
                }
                if (ms > max_ms)
                        max_ms = ms;
        }
        *taken = index;
        memset(out, 0, BATCH_HEADER);
        put_number(out + AT_EPOCH, (uint64_t)-1, 4);
        out[AT_MAGIC] = 2;
        put_number(out + AT_ATTRIBUTES, (uint64_t)attributes, 2);
        put_number(out + AT_LAST, (uint64_t)(index - 1), 4);
        put_number(out + AT_FIRST_MS, (uint64_t)first_ms, 8);
        put_number(out + AT_MAX_MS, (uint64_t)max_ms, 8);
        put_number(out + AT_COUNT, (uint64_t)index, 4);
        put_number(out + AT_CRC, kafka_eos_crc32c(0, out + BATCH_HEADER, at - out - BATCH_HEADER), 4);
        return at - out;
}

/*
 * Encodes rows of several partitions as record batches, one after the other in `out`, each with its header. `order`
 * lists the rows of one partition after the other; those of the last one end before ends[partitions - 1]. The other
 * arguments are those of `encode`. A sender completes each header with kafka_eos_stamp.
 *
 * Returns the number of batches, and for each of them where it ends in `out` and the index of its partition; -1 if
 * there is no room for all of them.
 */
EXPORT int64_t kafka_eos_seal(const rows_t *batches, const int64_t *order, const int64_t *ends, int64_t partitions,
                              int64_t now_ms, int32_t attributes, int64_t limit, uint8_t *out, int64_t capacity,
                              int64_t *batch_ends, int64_t *batch_partitions, int64_t most_batches) {
        int64_t index, row = 0, count = 0, bytes = 0, taken;

        for (index = 0; index < partitions; index++)
                for (; row < ends[index]; row += taken) {
                        if (count == most_batches)
                                return -1;
                        bytes += encode(batches, order + row, ends[index] - row, now_ms, attributes, limit, out + bytes,
                                        capacity - bytes, &taken);
                        if (taken == 0)
                                return -1;
                        batch_ends[count]         = bytes;
                        batch_partitions[count++] = index;
                }
        return count;
}

/* ---- reading record batches ------------------------------------------------------------------------------ */

/* A record batch of a fetched partition, as kafka.record_batches.BATCH describes it. */
typedef struct {
        int64_t at, bytes; /* of the whole batch, in the fetched bytes */
        int64_t first_offset, past_offset;
        int64_t producer_id;
        int64_t first_ms, max_ms;
        int32_t count, attributes;
        int32_t magic, is_intact;
} batch_t;

static uint64_t get_number(const uint8_t *at, int bytes) {
        uint64_t number = 0;
        while (bytes-- > 0)
                number = number << 8 | *at++;
        return number;
}

/*
 * Lists the complete record batches of a fetched partition; `checks` says whether to check their checksums. The last
 * batch may be cut off; it is left out. Stops behind the first batch that is damaged, or has another format (`magic`), because
 * nothing is known about what follows. Returns the number of batches.
 */
EXPORT int64_t kafka_eos_list(const uint8_t *from, int64_t bytes, int32_t checks, batch_t *batches, int64_t most) {
        int64_t count = 0, at = 0;

        while (count < most && bytes - at > AT_MAGIC) {
                const uint8_t *head = from + at;
                batch_t *batch      = &batches[count];
                int64_t length      = (int32_t)get_number(head + AT_LENGTH, 4);

                if (length >= 0 && length > bytes - at - AT_EPOCH)
                        break;
                memset(batch, 0, sizeof(*batch));
                batch->at           = at;
                batch->bytes        = length + AT_EPOCH;
                batch->first_offset = (int64_t)get_number(head, 8);
                batch->magic        = (int8_t)head[AT_MAGIC];
                count++;
                if (batch->magic != 2 || length < BATCH_HEADER - AT_EPOCH)
                        break;
                batch->attributes  = (int32_t)get_number(head + AT_ATTRIBUTES, 2);
                batch->past_offset =
                    (int64_t)((uint64_t)batch->first_offset + get_number(head + AT_LAST, 4) + 1); /* may wrap if damaged */
                batch->first_ms    = (int64_t)get_number(head + AT_FIRST_MS, 8);
                batch->max_ms      = (int64_t)get_number(head + AT_MAX_MS, 8);
                batch->producer_id = (int64_t)get_number(head + AT_PRODUCER, 8);
                batch->count       = (int32_t)get_number(head + AT_COUNT, 4);
                batch->is_intact   = (!checks || kafka_eos_crc32c(0, head + AT_ATTRIBUTES, batch->bytes - AT_ATTRIBUTES) ==
                                                   (uint32_t)get_number(head + AT_CRC, 4)) &&
                                   batch->first_offset >= 0 && batch->past_offset > batch->first_offset &&
                                   batch->past_offset - batch->first_offset <= (int64_t)INT32_MAX + 1 && batch->count >= 0;
                if (!batch->is_intact)
                        break;
                at += batch->bytes;
        }
        return count;
}

/* Records of one batch that are to be decoded, as kafka.record_batches.RECORDS describes them. */
typedef struct {
        const uint8_t *at; /* not compressed */
        int64_t bytes;
        int64_t first_offset, past_offset;
        int64_t first_ms;
        int64_t append_ms; /* the time of all records; -1 = they have their own */
        int64_t topic;
        int32_t count, partition;
} records_t;

/* Reads a number of variable length. Returns what follows it; NULL if it is cut off or too long. */
static inline const uint8_t *get_varint(const uint8_t *at, const uint8_t *past, int64_t *number) {
        uint64_t found = 0;
        int shift;

        if (at < past && *at < 0x80) {
                *number = (int64_t)(*at >> 1) ^ -(int64_t)(*at & 1);
                return at + 1;
        }
        for (shift = 0; shift < 70 && at < past; shift += 7) {
                uint8_t next = *at++;
                found |= (uint64_t)(next & 0x7F) << shift;
                if (next < 0x80) {
                        *number = (int64_t)(found >> 1) ^ -(int64_t)(found & 1);
                        return at;
                }
        }
        return NULL;
}

/* Reads a length and as many bytes; *from is NULL for the length -1. Returns what follows; NULL if that is wrong. */
static inline const uint8_t *get_bytes(const uint8_t *at, const uint8_t *past, const uint8_t **from, int64_t *bytes) {
        at = get_varint(at, past, bytes);
        if (!at || *bytes < -1 || *bytes > past - at)
                return NULL;
        *from = *bytes < 0 ? NULL : at;
        return *bytes < 0 ? at : at + *bytes;
}

/*
 * Returns how many bytes at `at`, where no character of UTF-8 begins, one replacement character stands for: the
 * beginning of a character that is cut off (Unicode's "maximal subpart"), otherwise one byte.
 */
static int64_t ill_formed_bytes(const uint8_t *at, int64_t left) {
        int64_t known, total;

        for (known = left < 3 ? left : 3; known > 1; known--)
                for (total = known + 1; total <= 4; total++) {
                        uint8_t completed[4] = {0, 0x80, 0x80, 0x80};
                        memcpy(completed, at, (size_t)known);
                        if (is_utf8(completed, total))
                                return known;
                }
        return 1;
}

/* Appends a name to a column as UTF-8, with U+FFFD for what is none, as Kafka's Java client decodes it. */
static int append_repaired(column_t *column, int64_t index, const uint8_t *from, int64_t bytes) {
        static const uint8_t replacement[] = {0xEF, 0xBF, 0xBD};
        part_t text                        = {NULL, 0, 0};
        int64_t length;
        int done = 1;

        while (bytes && done) {
                for (length = 1; length < 4 && length < bytes && !is_utf8(from, length); length++)
                        ;
                if (is_utf8(from, length)) {
                        done = append(&text, from, length);
                } else {
                        length = ill_formed_bytes(from, bytes);
                        done   = append(&text, replacement, sizeof(replacement));
                }
                from += length;
                bytes -= length;
        }
        done = done && append_entry(column, index, text.at, text.bytes);
        free(text.at);
        return done;
}

/*
 * Appends `number` headers that begin at `at` to the arrays of names (never null) and values. A name ends at its
 * first NUL, as in librdkafka, unless its bytes are wanted as they are. Returns what follows the headers; NULL as get_bytes.
 */
static const uint8_t *decode_headers(block_t *block, const uint8_t *at, const uint8_t *past, int64_t number) {
        const uint8_t *next = at, *name = NULL, *value = NULL;
        int64_t index, name_length, value_length = 0;
        int32_t count    = (int32_t)number;
        const int is_raw = (block->wanted & WANT_RAW_NAMES) != 0;

        for (index = 0; index < number; index++) {
                next = get_bytes(next, past, &name, &name_length);
                next = next ? get_bytes(next, past, &value, &value_length) : NULL;
                if (!next || !name)
                        return NULL;
        }
        for (index = 0; index < number; index++) {
                int done;
                at          = get_bytes(at, past, &name, &name_length);
                at          = get_bytes(at, past, &value, &value_length);
                if (!is_raw)
                        name_length = (int64_t)strnlen((const char *)name, (size_t)name_length);
                done        = is_raw || is_utf8(name, name_length)
                                      ? append_entry(&block->header_names, block->entries, name, name_length)
                                      : append_repaired(&block->header_names, block->entries, name, name_length);
                if (!done || !append_entry(&block->header_values, block->entries, value, value ? value_length : 0))
                        block->no_memory = 1;
                block->entries++;
        }
        if (!append(&block->header_counts, &count, sizeof(count)))
                block->no_memory = 1;
        return next;
}

/* Makes room in a column for entries whose values have `bytes` bytes together. */
static int reserve_entries(column_t *column, int64_t rows, int64_t entries, int64_t bytes) {
        static const int32_t zero = 0;

        if (rows == 0 && column->offsets.bytes == 0 && !append(&column->offsets, &zero, sizeof(zero)))
                return 0;
        return reserve_within(&column->offsets, entries * (int64_t)sizeof(int32_t), NULL) &&
               reserve_within(&column->validity, (rows + entries + 7) / 8 - column->validity.bytes, NULL) &&
               reserve_within(&column->data, bytes, NULL);
}

/* Like append_entry, in a column that has room. */
static inline void put_entry(column_t *column, int64_t index, const uint8_t *from, int64_t bytes) {
        int32_t *offsets = (int32_t *)column->offsets.at;

        if ((index & 7) == 0)
                column->validity.at[column->validity.bytes++] = 0;
        if (from) {
                memcpy(column->data.at + column->data.bytes, from, (size_t)bytes);
                column->data.bytes += bytes;
                column->validity.at[index >> 3] |= (uint8_t)(1u << (index & 7));
        } else {
                column->nulls++;
        }
        offsets[index + 1] = (int32_t)column->data.bytes;
        column->offsets.bytes += (int64_t)sizeof(int32_t);
}

/* Makes room in a block for the records of one batch. Without headers, no column then grows while it is decoded. */
static int reserve_batch(block_t *block, const records_t *batch) {
        const int64_t count = batch->count, narrow = count * 4, wide = count * 8;

        return reserve_within(&block->offsets, wide, NULL) && reserve_within(&block->partitions, narrow, NULL) &&
               reserve_within(&block->topics, wide, NULL) &&
               (!(block->wanted & WANT_KEY) || reserve_entries(&block->keys, block->rows, count, batch->bytes)) &&
               (!(block->wanted & WANT_VALUE) || reserve_entries(&block->values, block->rows, count, batch->bytes)) &&
               (!(block->wanted & WANT_TIMESTAMP) || (reserve_within(&block->timestamps_ms, wide, NULL) &&
                                                      reserve_within(&block->timestamp_types, narrow, NULL)));
}

static inline void put_wide(part_t *part, int64_t number) {
        memcpy(part->at + part->bytes, &number, sizeof(number));
        part->bytes += (int64_t)sizeof(number);
}

static inline void put_narrow(part_t *part, int32_t number) {
        memcpy(part->at + part->bytes, &number, sizeof(number));
        part->bytes += (int64_t)sizeof(number);
}

/* Appends the records of one batch to a block. Returns 0 if the batch is damaged; see also `no_memory`. */
static int decode_batch(block_t *block, const records_t *batch) {
        const uint8_t *at = batch->at, *past = batch->at + batch->bytes, *end, *key, *value;
        int64_t index, length, delta_ms, delta, key_length, value_length, number, before = -1;
        const int32_t kind = batch->append_ms < 0 ? 0 : 1, wanted = block->wanted;

        if (batch->count < 0 || batch->count > batch->bytes) /* each record has several bytes */
                return 0;
        if (!reserve_batch(block, batch)) {
                block->no_memory = 1;
                return 1;
        }
        for (index = 0; index < batch->count; index++) {
                at = get_varint(at, past, &length);
                if (!at || length < 1 || length > past - at)
                        return 0;
                end = at + length;
                at  = get_varint(at + 1, end, &delta_ms); /* after the attributes, which are not used */
                at  = at ? get_varint(at, end, &delta) : NULL;
                at  = at ? get_bytes(at, end, &key, &key_length) : NULL;
                at  = at ? get_bytes(at, end, &value, &value_length) : NULL;
                at  = at ? get_varint(at, end, &number) : NULL;
                if (!at || delta <= before || delta >= batch->past_offset - batch->first_offset || number < 0 ||
                    number > end - at)
                        return 0;
                before = delta;
                put_wide(&block->offsets, batch->first_offset + delta);
                put_narrow(&block->partitions, batch->partition);
                put_wide(&block->topics, batch->topic);
                if (wanted & WANT_KEY)
                        put_entry(&block->keys, block->rows, key, key_length);
                if (wanted & WANT_VALUE)
                        put_entry(&block->values, block->rows, value, value_length);
                if (wanted & WANT_TIMESTAMP) {
                        put_wide(&block->timestamps_ms,
                                 kind ? batch->append_ms : (int64_t)((uint64_t)batch->first_ms + (uint64_t)delta_ms));
                        put_narrow(&block->timestamp_types, kind);
                }
                if (wanted & WANT_HEADERS) {
                        at = decode_headers(block, at, end, number);
                        if (block->no_memory)
                                return 1;
                }
                if (at != end && (number == 0 || wanted & WANT_HEADERS))
                        return 0; /* bytes that belong to nothing: Java's client refuses them, too */
                block->rows++;
                at = end;
        }
        return at == past;
}

/*
 * Decodes records into a new block. `topic` of a batch becomes that of its rows. If a batch is
 * damaged, its index is in `damaged`, and the block has no use. Free the result with kafka_eos_free. Returns NULL if
 * there is not enough memory; if memory runs out later, `no_memory` is set in the result.
 */
EXPORT block_t *kafka_eos_decode(const records_t *batches, int64_t count, int32_t wanted) {
        block_t *block = new_block();
        int64_t index, bytes = 0;

        if (!block)
                return NULL;
        block->wanted  = wanted;
        block->damaged = -1;
        for (index = 0; index < count && block->damaged < 0 && !block->no_memory; index++) {
                bytes += batches[index].bytes;
                if (bytes > KAFKA_EOS_LARGEST_OFFSET)
                        block->no_memory = 1; /* offsets of a column have 32 bits; callers stay far below */
                else if (!decode_batch(block, &batches[index]))
                        block->damaged = index;
        }
        return block;
}
