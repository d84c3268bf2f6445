/*
 * Decodes Avro payloads into Arrow buffers, and encodes Arrow arrays as Avro payloads.
 *
 * Python (registry/avro/) compiles a schema into a program: a tree of nodes in one flat array. The functions below
 * interpret the program for each row. The program is trusted, because Python wrote it. Payloads are not: every
 * read is checked against the end of its message, and no amount of memory depends on a length before as many bytes
 * as it says are known to be there. A call stops before the row with which its columns would take more memory than
 * the caller allows, or an offset would not fit into an int32. The caller goes on from there with another call.
 *
 * This is a plain shared library that links against nothing, like kernel.c. buffers.h has what both need. It has no
 * state. Callers must release Python's GIL, which ctypes does. registry/avro.py declares the structs and
 * functions. If you change one, change KAFKA_EOS_AVRO_VERSION here and VERSIONS in __init__.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"

#define KAFKA_EOS_AVRO_VERSION 3

EXPORT int32_t kafka_eos_avro_version(void) { return KAFKA_EOS_AVRO_VERSION; }

/* ---- errors -------------------------------------------------------------------------------------------- */

/* What went wrong. registry/avro.py has the texts. `text` begins a value that the message quotes. */
typedef struct {
        int64_t row, node, code, detail, more;
        uint8_t text[48];
} error_t;

enum {
        TRUNCATED = 1,
        VARINT,
        INT_RANGE,
        UNION_INDEX,
        ENUM_INDEX,
        ENUM_SYMBOL,
        NEGATIVE_LENGTH,
        UTF8,
        DECIMAL_SIZE,
        OVERFLOW,
        BRANCH,
        TRAILING,
        SHORT,
        EMPTY_ITEMS,
        DEPTH = 16,
        BOOLEAN,
        BLOCK_BYTES,
        NULL_VALUE,
        FIXED_SIZE,
        SYMBOL,
        MEMBERS,
        DECIMAL_RANGE
};

/* How a call ended. STOPPED: the columns would have become too large; `rows` were converted before. */
enum { DONE = 0, NO_MEMORY = 1, STOPPED = 2 };

/* The most items of arrays and maps in one row that take no bytes in the payload. */
#define MAX_EMPTY_ITEMS 65536
/* The most records, arrays and maps inside each other: fields that are skipped can be recursive. */
#define MAX_DEPTH 100

/* 128-bit two's complement, least significant half first, as Arrow stores decimals on little-endian machines. */
typedef struct {
        uint64_t low;
        int64_t high;
} wide_t;

static int is_magnitude_below(wide_t value, const uint64_t limit[2]) {
        uint64_t low = value.low, high = (uint64_t)value.high;
        if (value.high < 0) { /* -value; the most negative number becomes 2^127, which is beyond each limit */
                low  = ~low + 1;
                high = ~high + (low == 0);
        }
        return high < limit[1] || (high == limit[1] && low < limit[0]);
}

/* ---- decoding ------------------------------------------------------------------------------------------ */

/* How a node reads. A node whose column is -1 only skips. `program.py` describes the operands. */
enum {
        OP_NULL = 0,
        OP_BOOLEAN,
        OP_INT,
        OP_LONG,
        OP_FLOAT,
        OP_DOUBLE,
        OP_BYTES,
        OP_STRING,
        OP_FIXED,
        OP_ENUM,
        OP_DECIMAL,
        OP_DECIMAL_FIXED,
        OP_RECORD,
        OP_ARRAY,
        OP_MAP,
        OP_UNION,
        OP_MEMBER,
        OP_DEFAULT,
        OP_MISMATCH
};

typedef struct {
        int64_t op, column, first, count, a, b;
} node_t;

/* How a column stores its values. */
enum { NONE = 0, BITS, I32, I64, F32, F64, D128, TEXT, STRUCT, LIST };

typedef struct {
        int64_t kind, first, count, rows;
        part_t validity, values, heap;
} column_t;

/* The input of a call. Python owns all memory of it. */
typedef struct {
        const node_t *nodes;
        const int64_t *links;   /* children of nodes, and of columns */
        const int64_t *symbols; /* offset and length in `text` of each symbol; length -1: the reader lacks it */
        const uint8_t *text;    /* symbols, and default values in Avro's encoding */
        const int64_t *columns; /* kind, first, count of each */
        int64_t column_count;
        const uint8_t *validity; /* of the messages; NULL = none is null */
        const uint8_t *offsets;
        const uint8_t *data;
        int64_t offset_width, offset, rows, start;
        int64_t most_bytes; /* that the columns may take */
} input_t;

typedef struct {
        int64_t rows, status, column_count;
        part_t errors;
        column_t columns[];
} block_t;

typedef struct {
        const input_t *input;
        column_t *columns;
        const uint8_t *at, *past;
        allowance_t allowance;
        int64_t empty_items, depth, status;
        error_t error;
} run_t;

static int fail(run_t *run, int64_t node, int64_t code, int64_t detail, int64_t more) {
        run->error.node   = node;
        run->error.code   = code;
        run->error.detail = detail;
        run->error.more   = more;
        return 0;
}

static int abandon(run_t *run, int64_t status) {
        run->status = status;
        return 0;
}

static int no_room(run_t *run) { return abandon(run, run->allowance.is_exceeded ? STOPPED : NO_MEMORY); }

static inline int room(run_t *run, part_t *part, int64_t bytes) {
        return reserve_within(part, bytes, &run->allowance) || no_room(run);
}

static inline int append_bit(run_t *run, part_t *part, int64_t index, int bit) {
        uint8_t mask = (uint8_t)(1u << (index & 7));
        if ((index & 7) == 0) {
                if (!room(run, part, 1))
                        return 0;
                part->at[part->bytes++] = 0;
        }
        if (bit)
                part->at[index >> 3] |= mask;
        else
                part->at[index >> 3] &= (uint8_t)~mask;
        return 1;
}

/* Ends a row of a column: its value is stored, or is null. */
static inline int end_row(run_t *run, column_t *column, int is_valid) {
        if (!append_bit(run, &column->validity, column->rows, is_valid))
                return 0;
        column->rows++;
        return 1;
}

static inline int append_value(run_t *run, column_t *column, const void *value, int64_t width) {
        if (!room(run, &column->values, width))
                return 0;
        memcpy(column->values.at + column->values.bytes, value, (size_t)width);
        column->values.bytes += width;
        return end_row(run, column, 1);
}

static inline int append_offset(run_t *run, column_t *column, int64_t offset) {
        int32_t narrow = (int32_t)offset;
        if (offset > KAFKA_EOS_LARGEST_OFFSET)
                return abandon(run, STOPPED);
        if (!room(run, &column->values, 4))
                return 0;
        memcpy(column->values.at + column->values.bytes, &narrow, 4);
        column->values.bytes += 4;
        return 1;
}

static inline int append_text(run_t *run, column_t *column, const uint8_t *at, int64_t bytes) {
        if (!room(run, &column->heap, bytes))
                return 0;
        if (bytes > 0)
                memcpy(column->heap.at + column->heap.bytes, at, (size_t)bytes);
        column->heap.bytes += bytes;
        return append_offset(run, column, column->heap.bytes) && end_row(run, column, 1);
}

static const int64_t WIDTHS[] = {0, 0, 4, 8, 4, 8, 16, 4, 0, 4};

static int append_null(run_t *run, column_t *column) {
        static const uint8_t zeros[16] = {0};
        int64_t child;

        switch (column->kind) {
        case NONE:
                break;
        case BITS:
                if (!append_bit(run, &column->values, column->rows, 0))
                        return 0;
                break;
        case TEXT:
                if (!append_offset(run, column, column->heap.bytes))
                        return 0;
                break;
        case LIST:
                if (!append_offset(run, column, run->columns[run->input->links[column->first]].rows))
                        return 0;
                break;
        case STRUCT:
                for (child = 0; child < column->count; child++)
                        if (!append_null(run, &run->columns[run->input->links[column->first + child]]))
                                return 0;
                break;
        default:
                if (!room(run, &column->values, WIDTHS[column->kind]))
                        return 0;
                memcpy(column->values.at + column->values.bytes, zeros, (size_t)WIDTHS[column->kind]);
                column->values.bytes += WIDTHS[column->kind];
        }
        return end_row(run, column, 0);
}

/* Takes back what a row that failed appended. */
static void truncate_rows(run_t *run, column_t *column, int64_t rows) {
        int64_t child;

        switch (column->kind) {
        case NONE:
                break;
        case BITS:
                column->values.bytes = (rows + 7) >> 3;
                break;
        case TEXT:
                column->heap.bytes   = offset_at(column->values.at, rows, 4);
                column->values.bytes = (rows + 1) * 4;
                break;
        case LIST:
                truncate_rows(run, &run->columns[run->input->links[column->first]],
                              offset_at(column->values.at, rows, 4));
                column->values.bytes = (rows + 1) * 4;
                break;
        case STRUCT:
                for (child = 0; child < column->count; child++)
                        truncate_rows(run, &run->columns[run->input->links[column->first + child]], rows);
                break;
        default:
                column->values.bytes = rows * WIDTHS[column->kind];
        }
        column->validity.bytes = (rows + 7) >> 3;
        column->rows           = rows;
}

static int read_long_varint(run_t *run, int64_t node, int64_t *value) {
        const uint8_t *at = run->at;
        uint64_t bits     = 0;
        int shift         = 0;

        for (;;) {
                uint8_t byte;
                if (at == run->past)
                        return fail(run, node, TRUNCATED, 1, 0);
                byte = *at++;
                if (shift == 63 && byte > 1)
                        return fail(run, node, VARINT, 0, 0);
                bits |= (uint64_t)(byte & 0x7F) << shift;
                if (byte < 0x80)
                        break;
                shift += 7;
        }
        run->at = at;
        *value  = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
        return 1;
}

static inline int read_varint(run_t *run, int64_t node, int64_t *value) {
        if (run->at < run->past && *run->at < 0x80) {
                uint8_t byte = *run->at++;
                *value       = (int64_t)(byte >> 1) ^ -(int64_t)(byte & 1);
                return 1;
        }
        return read_long_varint(run, node, value);
}

static inline int need(run_t *run, int64_t node, int64_t bytes) {
        int64_t left = run->past - run->at;
        return bytes <= left || fail(run, node, TRUNCATED, bytes, left);
}

/* Reads the length of bytes or a string, and checks that they are there. */
static inline int read_length(run_t *run, int64_t node, int64_t *bytes) {
        if (!read_varint(run, node, bytes))
                return 0;
        if (*bytes < 0)
                return fail(run, node, NEGATIVE_LENGTH, *bytes, 0);
        return need(run, node, *bytes);
}

static int append_number(run_t *run, int64_t index, int64_t number) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = &run->columns[node->column];

        switch (column->kind) {
        case I32: {
                int32_t value = (int32_t)number;
                return append_value(run, column, &value, 4);
        }
        case I64:
                if (node->a > 1) {
                        if (number > INT64_MAX / node->a || number < INT64_MIN / node->a)
                                return fail(run, index, OVERFLOW, number, 0);
                        number *= node->a;
                } else if (node->b > 1) {
                        number = number / node->b - (number % node->b < 0);
                }
                return append_value(run, column, &number, 8);
        case F32: {
                float value = (float)number;
                return append_value(run, column, &value, 4);
        }
        default: {
                double value = (double)number;
                return append_value(run, column, &value, 8);
        }
        }
}

/* Multiplies a number by ten, and again; the caller knows that the result fits into 128 bits. */
static void append_digits(wide_t *value, int64_t digits) {
        uint64_t low = value->low, high = (uint64_t)value->high;

        for (; digits > 0; digits--) { /* 10 v = 8 v + 2 v */
                uint64_t low8 = low << 3, low2 = low << 1;
                high = (high << 3 | low >> 61) + (high << 1 | low >> 63);
                low  = low8 + low2;
                high += low < low8;
        }
        value->low  = low;
        value->high = (int64_t)high;
}

/* Appends a number with `b` more digits. */
KAFKA_EOS_COLD static int append_longer(run_t *run, const node_t *node, wide_t value) {
        append_digits(&value, node->b);
        return append_value(run, &run->columns[node->column], &value, 16);
}

/* Appends a big-endian two's complement number of any size with `b` more digits. `symbols` has the limit before. */
static int append_decimal(run_t *run, int64_t index, const uint8_t *at, int64_t bytes) {
        const node_t *node = &run->input->nodes[index];
        uint8_t sign       = bytes > 0 && (*at & 0x80) ? 0xFF : 0;
        int64_t all        = bytes, taken;
        uint64_t limit[2], high;
        wide_t value;

        if (bytes == 0)
                return fail(run, index, DECIMAL_SIZE, 0, 0);
        memcpy(limit, &run->input->symbols[node->first], 16);
        for (; bytes > 16; at++, bytes--)
                if (*at != sign)
                        return fail(run, index, DECIMAL_SIZE, all, 0);
        if ((*at & 0x80) != (sign & 0x80))
                return fail(run, index, DECIMAL_SIZE, all, 0);
        value.low = sign ? UINT64_MAX : 0;
        high      = value.low;
        for (taken = 0; taken < bytes; taken++) {
                high      = high << 8 | value.low >> 56;
                value.low = value.low << 8 | at[taken];
        }
        value.high = (int64_t)high;
        if (!is_magnitude_below(value, limit))
                return fail(run, index, DECIMAL_SIZE, all, 0);
        if (node->b)
                return append_longer(run, node, value);
        return append_value(run, &run->columns[node->column], &value, 16);
}

static int decode_node(run_t *run, int64_t index);

/* Reads the blocks of an array or a map. */
static int decode_items(run_t *run, int64_t index, int is_map) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = node->column < 0 ? NULL : &run->columns[node->column];
        column_t *items    = column ? &run->columns[run->input->links[column->first]] : NULL;
        column_t *keys     = items && is_map ? &run->columns[run->input->links[items->first]] : NULL;

        for (;;) {
                int64_t count, bytes = -1;
                if (!read_varint(run, index, &count))
                        return 0;
                if (count == 0)
                        break;
                if (count < 0) {
                        if (count == INT64_MIN)
                                return fail(run, index, NEGATIVE_LENGTH, count, 0);
                        count = -count;
                        if (!read_varint(run, index, &bytes))
                                return 0;
                        if (bytes < 0 || bytes > run->past - run->at)
                                return fail(run, index, BLOCK_BYTES, bytes, run->past - run->at);
                        if (!column) {
                                run->at += bytes;
                                continue;
                        }
                }
                if (node->b > 0) {
                        if (count > (run->past - run->at) / node->b)
                                return fail(run, index, TRUNCATED, count, run->past - run->at);
                } else {
                        if (count > MAX_EMPTY_ITEMS - run->empty_items)
                                return fail(run, index, EMPTY_ITEMS, count, MAX_EMPTY_ITEMS);
                        run->empty_items += count;
                }
                while (count--) {
                        if (is_map) {
                                int64_t length;
                                if (!read_length(run, index, &length))
                                        return 0;
                                if (!is_utf8(run->at, length))
                                        return fail(run, index, UTF8, 0, 0);
                                if (keys && !append_text(run, keys, run->at, length))
                                        return 0;
                                run->at += length;
                        }
                        if (!decode_node(run, node->a))
                                return 0;
                        if (keys && !end_row(run, items, 1))
                                return 0;
                }
        }
        if (!column)
                return 1;
        return append_offset(run, column, items->rows) && end_row(run, column, 1);
}

/* Decodes one value, and appends it to its column. Returns 0 on failure, which `run` describes. */
static int decode_node(run_t *run, int64_t index) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = node->column < 0 ? NULL : &run->columns[node->column];
        int64_t number;

        switch (node->op) {
        case OP_NULL:
                return !column || append_null(run, column);
        case OP_BOOLEAN: {
                uint8_t byte;
                if (!need(run, index, 1))
                        return 0;
                byte = *run->at++;
                if (byte > 1)
                        return fail(run, index, BOOLEAN, byte, 0);
                return !column || (append_bit(run, &column->values, column->rows, byte) &&
                                   end_row(run, column, 1));
        }
        case OP_INT:
                if (!read_varint(run, index, &number))
                        return 0;
                if (number != (int32_t)number)
                        return fail(run, index, INT_RANGE, number, 0);
                return !column || append_number(run, index, number);
        case OP_LONG:
                return read_varint(run, index, &number) && (!column || append_number(run, index, number));
        case OP_FLOAT: {
                float value;
                if (!need(run, index, 4))
                        return 0;
                memcpy(&value, run->at, 4);
                run->at += 4;
                if (column && column->kind == F64) {
                        double longer = value;
                        return append_value(run, column, &longer, 8);
                }
                return !column || append_value(run, column, &value, 4);
        }
        case OP_DOUBLE:
                if (!need(run, index, 8))
                        return 0;
                run->at += 8;
                return !column || append_value(run, column, run->at - 8, 8);
        case OP_BYTES:
        case OP_STRING:
        case OP_DECIMAL:
                if (!read_length(run, index, &number))
                        return 0;
                run->at += number;
                if (node->op == OP_STRING && !is_utf8(run->at - number, number))
                        return fail(run, index, UTF8, 0, 0);
                if (!column)
                        return 1;
                if (node->op == OP_DECIMAL)
                        return append_decimal(run, index, run->at - number, number);
                return append_text(run, column, run->at - number, number);
        case OP_FIXED:
        case OP_DECIMAL_FIXED:
                if (!need(run, index, node->a))
                        return 0;
                run->at += node->a;
                if (!column)
                        return 1;
                if (node->op == OP_DECIMAL_FIXED)
                        return append_decimal(run, index, run->at - node->a, node->a);
                return append_text(run, column, run->at - node->a, node->a);
        case OP_ENUM: {
                const int64_t *symbol;
                if (!read_varint(run, index, &number))
                        return 0;
                if (number < 0 || number >= node->count)
                        return fail(run, index, ENUM_INDEX, number, node->count);
                if (!column)
                        return 1;
                symbol = run->input->symbols + node->first + 2 * number;
                if (symbol[1] < 0)
                        return fail(run, index, ENUM_SYMBOL, number, 0);
                return append_text(run, column, run->input->text + symbol[0], symbol[1]);
        }
        case OP_RECORD: {
                int64_t child;
                if (++run->depth > MAX_DEPTH)
                        return fail(run, index, DEPTH, MAX_DEPTH, 0);
                for (child = 0; child < node->count; child++)
                        if (!decode_node(run, run->input->links[node->first + child]))
                                return 0;
                run->depth--;
                return !column || end_row(run, column, 1);
        }
        case OP_ARRAY:
        case OP_MAP: {
                int done;
                if (++run->depth > MAX_DEPTH)
                        return fail(run, index, DEPTH, MAX_DEPTH, 0);
                done = decode_items(run, index, node->op == OP_MAP);
                run->depth--;
                return done;
        }
        case OP_UNION:
                if (!read_varint(run, index, &number))
                        return 0;
                if (number < 0 || number >= node->count)
                        return fail(run, index, UNION_INDEX, number, node->count);
                return decode_node(run, run->input->links[node->first + number]);
        case OP_MEMBER: {
                int64_t member;
                if (!decode_node(run, node->b))
                        return 0;
                for (member = 0; member < column->count; member++)
                        if (member != node->a &&
                            !append_null(run, &run->columns[run->input->links[column->first + member]]))
                                return 0;
                return end_row(run, column, 1);
        }
        case OP_DEFAULT: {
                const uint8_t *at = run->at, *past = run->past;
                int done;
                run->at   = run->input->text + node->a;
                run->past = run->at + node->b;
                done      = decode_node(run, node->first);
                run->at   = at;
                run->past = past;
                return done;
        }
        default:
                return fail(run, index, BRANCH, 0, 0);
        }
}

static int64_t input_offset(const input_t *input, int64_t row) {
        return offset_at(input->offsets, input->offset + row, input->offset_width);
}

static int decode_row(run_t *run, int64_t row) {
        const input_t *input = run->input;
        int64_t first        = input_offset(input, row);
        int64_t past         = input_offset(input, row + 1);

        if (past - first < input->start)
                return fail(run, 0, SHORT, past - first, input->start);
        run->at          = input->data + first + input->start;
        run->past        = input->data + past;
        run->empty_items = 0;
        run->depth       = 0;
        if (!decode_node(run, 0))
                return 0;
        if (run->at != run->past)
                return fail(run, 0, TRAILING, run->past - run->at, 0);
        return 1;
}

/*
 * Decodes the messages of `input`. Returns NULL if there is not enough memory for the block itself. Otherwise the
 * caller frees the block with kafka_eos_avro_free. A row that does not decode is null, with an entry in `errors`.
 * If the call stops before the first row, the columns are unusable.
 */
EXPORT block_t *kafka_eos_avro_decode(const input_t *input) {
        block_t *block = calloc(1, sizeof(block_t) + (size_t)input->column_count * sizeof(column_t));
        run_t run      = {.input = input};
        int64_t row, index;

        if (!block)
                return NULL;
        block->column_count = input->column_count;
        run.columns         = block->columns;
        run.allowance.left  = input->most_bytes;
        for (index = 0; index < input->column_count; index++) {
                column_t *column = &block->columns[index];
                column->kind     = input->columns[3 * index];
                column->first    = input->columns[3 * index + 1];
                column->count    = input->columns[3 * index + 2];
                if ((column->kind == TEXT || column->kind == LIST) && !append_offset(&run, column, 0))
                        break;
        }
        for (row = 0; row < input->rows && !run.status; row++) {
                if (is_valid(input->validity, input->offset + row)) {
                        if (decode_row(&run, row))
                                continue;
                        if (run.status)
                                break;
                        run.error.row = row;
                        truncate_rows(&run, &block->columns[0], row);
                        if (!append(&block->errors, &run.error, sizeof(error_t))) {
                                run.status = NO_MEMORY;
                                break;
                        }
                }
                if (!append_null(&run, &block->columns[0]))
                        break;
        }
        if (run.status == STOPPED && row > 0)
                truncate_rows(&run, &block->columns[0], row);
        block->rows   = row;
        block->status = run.status;
        return block;
}

EXPORT void kafka_eos_avro_free(block_t *block) {
        int64_t index;
        if (!block)
                return;
        for (index = 0; index < block->column_count; index++) {
                free(block->columns[index].validity.at);
                free(block->columns[index].values.at);
                free(block->columns[index].heap.at);
        }
        free(block->errors.at);
        free(block);
}

/* ---- encoding ------------------------------------------------------------------------------------------ */

/* What a node writes. encode_program.py describes the operands. */
enum {
        PUT_NOTHING = 0,
        PUT_TEXT_OF_PROGRAM,
        PUT_BOOLEAN,
        PUT_INTEGER,
        PUT_TIMESTAMP,
        PUT_FLOAT,
        PUT_DOUBLE,
        PUT_FLOAT_AS_DOUBLE,
        PUT_BYTES,
        PUT_STRING,
        PUT_FIXED,
        PUT_ENUM,
        PUT_DECIMAL,
        PUT_RECORD,
        PUT_ARRAY,
        PUT_MAP,
        PUT_MEMBERS
};

typedef struct {
        int64_t op, array, first, size, a, b;
        int64_t null_branch; /* number of null in the union around the type; -1 = null is an error */
        int64_t branch;      /* number of the type in the union around it; -1 = there is no union */
} put_t;

/* The input of a call. Python owns all memory of it. */
typedef struct {
        const put_t *nodes;
        const int64_t *links;
        const int64_t *symbols; /* offset and length in `text` of each symbol; limits of decimals */
        const uint8_t *text;
        const struct arrow_array *array;
        int64_t array_count; /* arrays in the tree below `array`, with itself */
        const uint8_t *prefix;
        int64_t prefix_bytes;
        int64_t most_bytes; /* that the column may take */
} values_t;

typedef struct {
        run_t run; /* for `fail`, `abandon` and `room` */
        const values_t *input;
        const struct arrow_array **arrays; /* the tree in the order of a depth-first walk, parents first */
        part_t *out;
} put_run_t;

static int put(put_run_t *run, const void *from, int64_t bytes) {
        if (bytes > KAFKA_EOS_LARGEST_OFFSET - run->out->bytes)
                return abandon(&run->run, STOPPED);
        return append_within(run->out, from, bytes, &run->run.allowance) || no_room(&run->run);
}

static int put_varint(put_run_t *run, int64_t number) {
        uint64_t bits = ((uint64_t)number << 1) ^ (number < 0 ? UINT64_MAX : 0);
        uint8_t bytes[10];
        int count = 0;

        while (bits >= 0x80) {
                bytes[count++] = (uint8_t)(bits | 0x80);
                bits >>= 7;
        }
        bytes[count++] = (uint8_t)bits;
        return put(run, bytes, count);
}

/* A value of variable or fixed size: where it is, and how long. `width` is that of offsets; 0 = `size` bytes each. */
static const uint8_t *text_at(const struct arrow_array *array, int64_t at, int64_t width, int64_t size,
                              int64_t *bytes) {
        int64_t bounds[2];
        *bytes = size;
        if (width == 0)
                return (const uint8_t *)array->buffers[1] + at * size;
        if (width == 8) {
                memcpy(bounds, (const uint8_t *)array->buffers[1] + at * 8, 16);
        } else {
                int32_t narrow[2];
                memcpy(narrow, (const uint8_t *)array->buffers[1] + at * 4, 8);
                bounds[0] = narrow[0];
                bounds[1] = narrow[1];
        }
        *bytes = bounds[1] - bounds[0];
        return *bytes ? (const uint8_t *)array->buffers[2] + bounds[0] : (const uint8_t *)"";
}

static int64_t integer_at(const struct arrow_array *array, int64_t at, int64_t width) {
        const uint8_t *from = (const uint8_t *)array->buffers[1] + at * width;
        int64_t number      = 0;

        if (width == 1) {
                number = (int8_t)*from;
        } else if (width == 2) {
                int16_t value;
                memcpy(&value, from, 2);
                number = value;
        } else if (width == 4) {
                int32_t value;
                memcpy(&value, from, 4);
                number = value;
        } else {
                memcpy(&number, from, 8);
        }
        return number;
}

/* Writes a decimal as bytes, as few as possible, or as fixed of `a` bytes, after `b` multiplications by 10. */
static int put_decimal(put_run_t *run, int64_t index, const uint8_t *from) {
        const put_t *node = &run->input->nodes[index];
        uint64_t limit[2], low, high;
        uint8_t bytes[32];
        wide_t value;
        int64_t taken, size = node->a;
        uint8_t sign;

        memcpy(&value, from, 16);
        memcpy(limit, &run->input->symbols[node->first], 16);
        if (!is_magnitude_below(value, limit))
                return fail(&run->run, index, DECIMAL_RANGE, 0, 0);
        append_digits(&value, node->b);
        low  = value.low;
        high = (uint64_t)value.high;
        sign = high >> 63 ? 0xFF : 0;
        for (taken = 0; taken < 16; taken++) {
                bytes[15 - taken] = (uint8_t)low;
                low               = low >> 8 | high << 56;
                high              = high >> 8;
        }
        if (size == 0) {
                int64_t first = 0;
                while (first < 15 && bytes[first] == sign && (bytes[first + 1] & 0x80) == (sign & 0x80))
                        first++;
                return put_varint(run, 16 - first) && put(run, bytes + first, 16 - first);
        }
        for (; size > 16; size--)
                if (!put(run, &sign, 1))
                        return 0;
        return put(run, bytes + 16 - size, size);
}

static int put_node(put_run_t *run, int64_t index, int64_t at);

static int put_items(put_run_t *run, int64_t index, const struct arrow_array *array, int64_t at) {
        const put_t *node = &run->input->nodes[index];
        int64_t first, past, entry;

        if (node->b == 8) {
                memcpy(&first, (const uint8_t *)array->buffers[1] + at * 8, 8);
                memcpy(&past, (const uint8_t *)array->buffers[1] + at * 8 + 8, 8);
        } else {
                int32_t bounds[2];
                memcpy(bounds, (const uint8_t *)array->buffers[1] + at * 4, 8);
                first = bounds[0];
                past  = bounds[1];
        }
        if (past > first && !put_varint(run, past - first))
                return 0;
        for (entry = first; entry < past; entry++) {
                if (node->op == PUT_MAP) {
                        int64_t inside = entry + run->arrays[node->array + 1]->offset;
                        if (!put_node(run, node->first, inside) || !put_node(run, node->a, inside))
                                return 0;
                } else if (!put_node(run, node->a, entry)) {
                        return 0;
                }
        }
        return put_varint(run, 0);
}

/* Writes value number `at` of the node's array, not counting the array's own offset. */
static int put_node(put_run_t *run, int64_t index, int64_t at) {
        const values_t *input = run->input;
        const put_t *node     = &input->nodes[index];
        const struct arrow_array *array;
        const uint8_t *from;
        int64_t bytes, number, child;

        if (node->op == PUT_NOTHING)
                return 1;
        if (node->op == PUT_TEXT_OF_PROGRAM)
                return put(run, input->text + node->a, node->b);
        array = run->arrays[node->array];
        at += array->offset;
        if (!is_valid(array->buffers[0], at)) {
                if (node->null_branch < 0)
                        return fail(&run->run, index, NULL_VALUE, 0, 0);
                return put_varint(run, node->null_branch);
        }
        if (node->branch >= 0 && !put_varint(run, node->branch))
                return 0;
        switch (node->op) {
        case PUT_BOOLEAN: {
                uint8_t byte = ((const uint8_t *)array->buffers[1])[at >> 3] >> (at & 7) & 1;
                return put(run, &byte, 1);
        }
        case PUT_INTEGER:
                number = integer_at(array, at, node->a);
                if (node->b == 4 && number != (int32_t)number)
                        return fail(&run->run, index, INT_RANGE, number, 0);
                return put_varint(run, number);
        case PUT_TIMESTAMP:
                number = integer_at(array, at, 8);
                if (node->a > 1) {
                        if (number > INT64_MAX / node->a || number < INT64_MIN / node->a)
                                return fail(&run->run, index, OVERFLOW, number, 0);
                        number *= node->a;
                } else if (node->b > 1) {
                        number = number / node->b - (number % node->b < 0);
                }
                return put_varint(run, number);
        case PUT_FLOAT:
                return put(run, (const uint8_t *)array->buffers[1] + at * 4, 4);
        case PUT_DOUBLE:
                return put(run, (const uint8_t *)array->buffers[1] + at * 8, 8);
        case PUT_FLOAT_AS_DOUBLE: {
                float value;
                double longer;
                memcpy(&value, (const uint8_t *)array->buffers[1] + at * 4, 4);
                longer = value;
                return put(run, &longer, 8);
        }
        case PUT_BYTES:
        case PUT_STRING:
                from = text_at(array, at, node->a, node->b, &bytes);
                if (node->op == PUT_STRING && !is_utf8(from, bytes))
                        return fail(&run->run, index, UTF8, 0, 0);
                return put_varint(run, bytes) && put(run, from, bytes);
        case PUT_FIXED:
                from = text_at(array, at, node->a, node->b, &bytes);
                if (bytes != node->size)
                        return fail(&run->run, index, FIXED_SIZE, bytes, node->size);
                return put(run, from, bytes);
        case PUT_ENUM:
                from = text_at(array, at, node->a, node->b, &bytes);
                for (child = 0; child < node->size; child++) {
                        const int64_t *symbol = input->symbols + node->first + 2 * child;
                        if (symbol[1] == bytes && memcmp(input->text + symbol[0], from, (size_t)bytes) == 0)
                                return put_varint(run, child);
                }
                number = bytes < (int64_t)sizeof(run->run.error.text) ? bytes : (int64_t)sizeof(run->run.error.text);
                memset(run->run.error.text, 0, sizeof(run->run.error.text));
                memcpy(run->run.error.text, from, (size_t)number);
                return fail(&run->run, index, SYMBOL, bytes, number);
        case PUT_DECIMAL:
                return put_decimal(run, index, (const uint8_t *)array->buffers[1] + at * 16);
        case PUT_RECORD:
                for (child = 0; child < node->size; child++)
                        if (!put_node(run, input->links[node->first + child], at))
                                return 0;
                return 1;
        case PUT_ARRAY:
        case PUT_MAP:
                return put_items(run, index, array, at);
        default: { /* PUT_MEMBERS */
                int64_t set = 0, found = 0;
                for (child = 0; child < node->size; child++) {
                        int64_t member = input->links[node->first + child];
                        const struct arrow_array *one = run->arrays[input->nodes[member].array];
                        if (is_valid(one->buffers[0], at + one->offset)) {
                                set++;
                                found = member;
                        }
                }
                if (set != 1)
                        return fail(&run->run, index, MEMBERS, set, 0);
                return put_node(run, found, at);
        }
        }
}

/*
 * Encodes the values of an array into one column of bytes. Returns NULL if there is not enough memory for the
 * block itself, or the array is not of the type that the program was compiled for. Otherwise the caller frees the
 * block with kafka_eos_avro_free. A row that is null stays null; a row that does not encode becomes null, with an
 * entry in `errors`.
 */
EXPORT block_t *kafka_eos_avro_encode(const values_t *input) {
        const struct arrow_array *array = input->array;
        block_t *block                  = calloc(1, sizeof(block_t) + sizeof(column_t));
        put_run_t run                   = {.input = input};
        column_t *column;
        int64_t row;

        if (block && count_arrays(array) == input->array_count)
                run.arrays = malloc((size_t)input->array_count * sizeof(*run.arrays));
        if (!run.arrays) {
                free(block);
                return NULL;
        }
        flatten(array, run.arrays, 0);
        column              = &block->columns[0];
        block->column_count = 1;
        column->kind        = TEXT;
        run.out             = &column->heap;
        run.run.allowance.left = input->most_bytes;
        append_offset(&run.run, column, 0);
        for (row = 0; row < array->length && !run.run.status; row++) {
                int64_t start = column->heap.bytes;
                int done      = 0;

                /* An array of type null has no validity, and all of it is null. */
                if (array->n_buffers > 0 && is_valid(array->buffers[0], array->offset + row)) {
                        done = put(&run, input->prefix, input->prefix_bytes) && put_node(&run, 0, row);
                        if (!done) {
                                if (run.run.status)
                                        break;
                                run.run.error.row  = row;
                                column->heap.bytes = start;
                                if (!append(&block->errors, &run.run.error, sizeof(error_t))) {
                                        run.run.status = NO_MEMORY;
                                        break;
                                }
                        }
                }
                if (!append_offset(&run.run, column, column->heap.bytes) || !end_row(&run.run, column, done))
                        break;
        }
        free(run.arrays);
        block->rows   = row;
        block->status = run.run.status;
        return block;
}
