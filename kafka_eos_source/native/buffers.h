/*
 * What the libraries share: buffers that grow, the check of UTF-8, and Arrow's C data interface.
 *
 * Each of these files is compiled on its own to a library of its own, so everything here is static.
 */
#ifndef KAFKA_EOS_BUFFERS_H
#define KAFKA_EOS_BUFFERS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/*
 * The most that an int32 offset of an Arrow array can be. Tests compile the libraries with a smaller number, to
 * reach the limit without gigabytes.
 */
#ifndef KAFKA_EOS_LARGEST_OFFSET
#define KAFKA_EOS_LARGEST_OFFSET INT32_MAX
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define KAFKA_EOS_COLD __attribute__((noinline, cold))
#else
#define KAFKA_EOS_COLD
#endif

/* A buffer that grows. Python reads `at` and `bytes`. */
typedef struct {
        uint8_t *at;
        int64_t bytes, capacity;
} part_t;

/*
 * What the buffers of one call may still allocate. The limit counts capacities, so it bounds what the process
 * gets from the operating system, and buffers pay for it only when they grow.
 */
typedef struct {
        int64_t left;
        int64_t is_exceeded; /* the limit was reached; otherwise a failure means that memory ran out */
} allowance_t;

/* Takes bytes from an allowance. Returns 0 if it does not have them. */
static inline int charge(allowance_t *allowance, int64_t bytes) {
        if (bytes > allowance->left) {
                allowance->is_exceeded = 1;
                return 0;
        }
        allowance->left -= bytes;
        return 1;
}

/* Makes room for `more` bytes. Without an allowance, only the memory of the machine is a limit. */
KAFKA_EOS_COLD static int grow(part_t *part, int64_t more, allowance_t *allowance) {
        int64_t capacity = part->capacity ? part->capacity : 256;
        uint8_t *at;

        if (more > INT64_MAX / 4 - part->bytes) /* the capacity, a power of two times 256, must not overflow */
                return 0;
        while (capacity < part->bytes + more)
                capacity *= 2;
        if (allowance && !charge(allowance, capacity - part->capacity))
                return 0;
        at = realloc(part->at, (size_t)capacity);
        if (!at) {
                if (allowance)
                        allowance->left += capacity - part->capacity;
                return 0;
        }
        part->at       = at;
        part->capacity = capacity;
        return 1;
}

/* Makes room for `more` bytes within an allowance. Returns 0 if there is none, or not enough memory. */
static inline int reserve_within(part_t *part, int64_t more, allowance_t *allowance) {
        return more <= part->capacity - part->bytes || grow(part, more, allowance);
}

/* Appends bytes within an allowance. Returns 0 as `reserve_within`. */
static inline int append_within(part_t *part, const void *from, int64_t bytes, allowance_t *allowance) {
        if (!reserve_within(part, bytes, allowance))
                return 0;
        if (bytes > 0)
                memcpy(part->at + part->bytes, from, (size_t)bytes);
        part->bytes += bytes;
        return 1;
}

/* Appends bytes. Returns 0 if there is not enough memory. */
static inline int append(part_t *part, const void *from, int64_t bytes) {
        return append_within(part, from, bytes, NULL);
}

/* Returns whether a string is valid UTF-8 as Python and the Unicode standard (table 3-7) define it. */
static inline int is_utf8(const uint8_t *at, int64_t bytes) {
        const uint8_t *past = at + bytes;
        for (;;) {
                uint8_t first, low = 0x80, high = 0xBF;
                int more;
                while (past - at >= 8) {
                        uint64_t eight;
                        memcpy(&eight, at, 8);
                        if (eight & UINT64_C(0x8080808080808080))
                                break;
                        at += 8;
                }
                while (at < past && *at < 0x80)
                        at++;
                if (at == past)
                        return 1;
                first = *at++;
                if (first >= 0xC2 && first <= 0xDF) {
                        more = 1;
                } else if (first >= 0xE0 && first <= 0xEF) {
                        more = 2;
                        if (first == 0xE0)
                                low = 0xA0; /* overlong */
                        else if (first == 0xED)
                                high = 0x9F; /* a surrogate */
                } else if (first >= 0xF0 && first <= 0xF4) {
                        more = 3;
                        if (first == 0xF0)
                                low = 0x90; /* overlong */
                        else if (first == 0xF4)
                                high = 0x8F; /* beyond U+10FFFF */
                } else {
                        return 0;
                }
                if (past - at < more || *at < low || *at > high)
                        return 0;
                for (at++; --more > 0; at++)
                        if ((*at & 0xC0) != 0x80)
                                return 0;
        }
}

/* Returns whether a value of an Arrow array is not null. Without a bitmap, no value is null. */
static inline int is_valid(const uint8_t *validity, int64_t index) {
        return !validity || (validity[index >> 3] >> (index & 7) & 1);
}

/* Returns an offset of an Arrow array with values of variable size. `width` is 4 or 8 bytes. */
static inline int64_t offset_at(const uint8_t *offsets, int64_t index, int64_t width) {
        int64_t found;
        int32_t narrow;
        if (width == 8) {
                memcpy(&found, offsets + index * 8, 8);
                return found;
        }
        memcpy(&narrow, offsets + index * 4, 4);
        return narrow;
}

/* The Arrow C data interface; the format is stable. */
struct arrow_array {
        int64_t length, null_count, offset, n_buffers, n_children;
        const void *const *buffers;
        struct arrow_array *const *children;
        struct arrow_array *dictionary;
        void (*release)(struct arrow_array *);
        void *private_data;
};

/* Writes the tree of arrays below an array, in the order of a depth-first walk. Returns where it ends. */
static inline int64_t flatten(const struct arrow_array *array, const struct arrow_array **into, int64_t at) {
        int64_t child;
        into[at++] = array;
        for (child = 0; child < array->n_children; child++)
                at = flatten(array->children[child], into, at);
        return at;
}

static inline int64_t count_arrays(const struct arrow_array *array) {
        int64_t child, count = 1;
        for (child = 0; child < array->n_children; child++)
                count += count_arrays(array->children[child]);
        return count;
}

#endif
