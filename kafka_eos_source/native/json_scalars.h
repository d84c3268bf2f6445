/*
 * Values as JSON documents write them: numbers, dates, times and base64. Part of json.c.
 *
 * The functions read bytes that at least eight readable bytes follow, or a text with an end, and allocate nothing. The
 * results do not depend on the locale of the process.
 */
#ifndef KAFKA_EOS_JSON_SCALARS_H
#define KAFKA_EOS_JSON_SCALARS_H

#include <float.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"

#if defined(__GNUC__)
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#else
#define LIKELY(condition) (condition)
#define UNLIKELY(condition) (condition)
#endif

/* The most characters of a number that becomes a value, as in Spark. */
#define LONGEST_NUMBER 1000

static inline uint64_t load64(const uint8_t *at) {
        uint64_t word;
        memcpy(&word, at, 8);
        return word;
}

static inline int first_bit(uint64_t bits) {
#if defined(__GNUC__)
        return __builtin_ctzll(bits);
#else
        int found = 0;
        for (; !(bits & 1); bits >>= 1)
                found++;
        return found;
#endif
}

static inline int is_digit(uint8_t byte) { return (uint8_t)(byte - '0') <= 9; }

static inline int is_word(const uint8_t *at, const char *word, size_t bytes) {
        return memcmp(at, word, bytes) == 0;
}

/* ---- numbers ---------------------------------------------------------------------------------------------- */

/* A number as it was written: mantissa * 10^exponent. */
typedef struct {
        uint64_t mantissa; /* right if `is_exact` */
        int64_t exponent;
        int is_negative, is_integer, is_exact;
        const uint8_t *digits, *past_digits; /* with a point */
} number_t;

static inline const uint8_t *no_digit(number_t *found, const uint8_t *at) {
        found->digits = at;
        return NULL;
}

/*
 * Reads a number, which a byte that is not a digit must follow. Returns its end; NULL if it is not well-formed, and
 * `digits` is then the place where a digit is missing.
 */
static inline const uint8_t *read_number(const uint8_t *at, number_t *found) {
        const uint8_t *start, *point = NULL;
        uint64_t mantissa = 0;
        int64_t count;

        found->is_negative = *at == '-';
        at += found->is_negative;
        start = at;
        if (*at == '0') {
                at++;
        } else if (is_digit(*at)) {
                do
                        mantissa = mantissa * 10 + (uint64_t)(*at++ - '0');
                while (is_digit(*at));
        } else {
                return no_digit(found, at);
        }
        found->is_integer = 1;
        found->exponent   = 0;
        if (*at == '.') {
                point             = at++;
                found->is_integer = 0;
                if (!is_digit(*at))
                        return no_digit(found, at);
                do
                        mantissa = mantissa * 10 + (uint64_t)(*at++ - '0');
                while (is_digit(*at));
                found->exponent = point + 1 - at;
        }
        found->digits      = start;
        found->past_digits = at;
        count              = at - start - (point != NULL);
        found->is_exact    = 1;
        if (UNLIKELY(count > 19)) {
                while (start < at && (*start == '0' || *start == '.')) { /* these are not significant */
                        count -= *start == '0';
                        start++;
                }
                found->is_exact = count <= 19;
        }
        found->mantissa = mantissa;
        if ((*at | 0x20) == 'e') {
                int64_t exponent = 0;
                int is_negative;
                found->is_integer = 0;
                at++;
                is_negative = *at == '-';
                at += is_negative || *at == '+';
                if (!is_digit(*at))
                        return no_digit(found, at);
                for (; is_digit(*at); at++)
                        if (exponent < 1000000) /* no type has numbers with such exponents */
                                exponent = exponent * 10 + (*at - '0');
                found->exponent += is_negative ? -exponent : exponent;
        }
        return at;
}

static inline void multiply(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low) {
#if defined(__SIZEOF_INT128__)
        unsigned __int128 product = (unsigned __int128)a * b;
        *high                     = (uint64_t)(product >> 64);
        *low                      = (uint64_t)product;
#else
        uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
        uint64_t low_low = a0 * b0, middle = a1 * b0 + (low_low >> 32), other = a0 * b1 + (uint32_t)middle;
        *high = a1 * b1 + (middle >> 32) + (other >> 32);
        *low  = other << 32 | (uint32_t)low_low;
#endif
}

static inline int leading_zeros(uint64_t bits) {
#if defined(__GNUC__)
        return __builtin_clzll(bits);
#else
        int found = 0;
        for (; !(bits >> 63); bits <<= 1)
                found++;
        return found;
#endif
}

/* What a binary floating-point type is made of. */
typedef struct {
        int mantissa_bits, least_exponent, infinite_exponent, least_even, most_even;
} format_t;

static const format_t DOUBLE_FORMAT = {52, -1023, 0x7FF, -4, 23};
static const format_t FLOAT_FORMAT  = {23, -127, 0xFF, -17, 10};

#define LEAST_POWER (-342)
#define MOST_POWER 308

/*
 * Returns the bits of the number of a binary type that is nearest to mantissa * 10^exponent, by the algorithm of
 * Eisel and Lemire ("Number parsing at a gigabyte per second", 2021). Returns -1 if it does not decide.
 */
static inline int64_t nearest(const uint64_t *powers, const format_t *format, uint64_t mantissa, int64_t exponent) {
        const uint64_t *power;
        uint64_t high, low, bits, mask = UINT64_MAX >> (format->mantissa_bits + 3);
        int zeros, upper, shift;
        int64_t binary;

        if (mantissa == 0)
                return 0;
        if (exponent < LEAST_POWER || exponent > MOST_POWER)
                return -1;
        power = powers + 2 * (exponent - LEAST_POWER);
        zeros = leading_zeros(mantissa);
        mantissa <<= zeros;
        multiply(mantissa, power[0], &high, &low);
        if ((high & mask) == mask) {
                uint64_t more, ignored;
                multiply(mantissa, power[1], &more, &ignored);
                low += more;
                high += low < more;
        }
        if (low == UINT64_MAX && (exponent < -27 || exponent > 55))
                return -1;
        upper  = (int)(high >> 63);
        shift  = upper + 64 - format->mantissa_bits - 3;
        bits   = high >> shift;
        binary = ((217706 * exponent) >> 16) + 63 + upper - zeros - format->least_exponent;
        if (binary <= 0) { /* subnormal */
                if (1 - binary >= 64)
                        return 0;
                bits >>= 1 - binary;
                bits += bits & 1;
                return (int64_t)(bits >> 1); /* if it is normal after all, the exponent is 1 by the carry */
        }
        if (low <= 1 && exponent >= format->least_even && exponent <= format->most_even && (bits & 3) == 1 &&
            bits << shift == high)
                bits &= ~UINT64_C(1);
        bits += bits & 1;
        bits >>= 1;
        if (bits >= UINT64_C(2) << format->mantissa_bits) {
                bits = UINT64_C(1) << format->mantissa_bits;
                binary++;
        }
        if (binary >= format->infinite_exponent)
                binary = format->infinite_exponent, bits = 0;
        return (int64_t)((bits & ~(UINT64_C(1) << format->mantissa_bits)) | (uint64_t)binary << format->mantissa_bits);
}

/* Writes a number without its point, so that `strtod` reads it alike in each locale. */
KAFKA_EOS_COLD static void without_point(const number_t *number, char *to) {
        const uint8_t *at;
        for (at = number->digits; at < number->past_digits; at++)
                if (*at != '.')
                        *to++ = (char)*at;
        snprintf(to, 24, "e%lld", (long long)number->exponent);
}

/* Returns whether a number fits into a double, which is the nearest one. */
static inline int to_double(const uint64_t *powers, const number_t *number, double *value) {
        static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                        1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
        double found;
#if FLT_EVAL_METHOD == 0
        if (LIKELY(number->is_exact && number->mantissa <= UINT64_C(1) << 53 && number->exponent >= -22 &&
                   number->exponent <= 22)) {
                found = (double)number->mantissa;
                if (number->exponent < 0)
                        found /= POWERS[-number->exponent];
                else
                        found *= POWERS[number->exponent];
                *value = number->is_negative ? -found : found;
                return 1;
        }
#else
        (void)POWERS;
#endif
        {
                int64_t bits = number->is_exact
                                       ? nearest(powers, &DOUBLE_FORMAT, number->mantissa, number->exponent)
                                       : -1;
                if (bits < 0) {
                        char text[LONGEST_NUMBER + 32];
                        without_point(number, text);
                        found = strtod(text, NULL);
                } else {
                        memcpy(&found, &bits, 8);
                }
        }
        *value = number->is_negative ? -found : found;
        return found <= DBL_MAX;
}

/* Returns whether a number fits into a float, which is the nearest one. Rounding to double first would be wrong. */
static inline int to_float(const uint64_t *powers, const number_t *number, float *value) {
        int64_t bits = number->is_exact && number->exponent >= -64
                               ? nearest(powers, &FLOAT_FORMAT, number->mantissa, number->exponent)
                               : -1;
        float found;
        if (bits < 0) {
                char text[LONGEST_NUMBER + 32];
                without_point(number, text);
                found = strtof(text, NULL);
        } else {
                uint32_t narrow = (uint32_t)bits;
                memcpy(&found, &narrow, 4);
        }
        *value = number->is_negative ? -found : found;
        return found <= FLT_MAX;
}

static const uint64_t TENS[] = {UINT64_C(1),
                                UINT64_C(10),
                                UINT64_C(100),
                                UINT64_C(1000),
                                UINT64_C(10000),
                                UINT64_C(100000),
                                UINT64_C(1000000),
                                UINT64_C(10000000),
                                UINT64_C(100000000),
                                UINT64_C(1000000000),
                                UINT64_C(10000000000),
                                UINT64_C(100000000000),
                                UINT64_C(1000000000000),
                                UINT64_C(10000000000000),
                                UINT64_C(100000000000000),
                                UINT64_C(1000000000000000),
                                UINT64_C(10000000000000000),
                                UINT64_C(100000000000000000),
                                UINT64_C(1000000000000000000),
                                UINT64_C(10000000000000000000)};

/* 128-bit, least significant half first, as Arrow stores decimals on little-endian machines. */
typedef struct {
        uint64_t low, high;
} wide_t;

static void append_digits(wide_t *to, uint64_t digits, int count) {
        uint64_t high, low;
        multiply(to->low, TENS[count], &high, &low);
        to->high = to->high * TENS[count] + high;
        to->low  = low + digits;
        to->high += to->low < low;
}

/* Returns whether a number fits into a decimal, rounded half up, away from zero. */
static int to_decimal(const number_t *number, int64_t precision, int64_t scale, wide_t *value) {
        const uint8_t *at = number->digits;
        int64_t digits = 0, kept, taken = 0;
        wide_t found = {0, 0};
        int count = 0, rounds = 0;
        uint64_t part = 0;

        while (at < number->past_digits && (*at == '0' || *at == '.'))
                at++;
        for (const uint8_t *each = at; each < number->past_digits; each++)
                digits += *each != '.';
        kept = digits + number->exponent + scale; /* digits of the result */
        if (digits == 0 || kept < 0) {
                *value = found;
                return 1;
        }
        if (kept > precision)
                return 0;
        for (; taken < kept && taken < digits; at++) {
                if (*at == '.')
                        continue;
                part = part * 10 + (uint64_t)(*at - '0');
                taken++;
                if (++count == 19) {
                        append_digits(&found, part, count);
                        part = 0, count = 0;
                }
        }
        append_digits(&found, part, count);
        if (taken < digits) {
                at += *at == '.';
                rounds = *at >= '5';
        } else {
                for (; kept - taken > 19; taken += 19)
                        append_digits(&found, 0, 19);
                append_digits(&found, 0, (int)(kept - taken));
        }
        found.low += (uint64_t)rounds;
        found.high += rounds && found.low == 0;
        if (rounds) { /* 9.99 can become 10.0 */
                wide_t limit = {1, 0};
                int64_t left = precision;
                for (; left > 19; left -= 19)
                        append_digits(&limit, 0, 19);
                append_digits(&limit, 0, (int)left);
                if (found.high > limit.high || (found.high == limit.high && found.low >= limit.low))
                        return 0;
        }
        if (number->is_negative) {
                found.low  = ~found.low + 1;
                found.high = ~found.high + (found.low == 0);
        }
        *value = found;
        return 1;
}

/* ---- dates and times, as Spark's casts read them ------------------------------------------------------------ */

static int64_t days_of(int64_t year, int64_t month, int64_t day) {
        int64_t era, of_era;
        year -= month <= 2;
        era    = (year >= 0 ? year : year - 399) / 400;
        of_era = year - era * 400;
        return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 +
               (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1 - 719468;
}

static int is_date(int64_t year, int64_t month, int64_t day) {
        static const uint8_t DAYS[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
        int is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        return month >= 1 && month <= 12 && day >= 1 && day <= DAYS[month - 1] + (month == 2 && is_leap);
}

/* A text, from which pieces are read. */
typedef struct {
        const uint8_t *at, *past;
} text_t;

static int is_blank(uint8_t byte) { return byte <= ' ' || byte == 0x7F; }

static text_t trimmed(text_t text) {
        while (text.at < text.past && is_blank(*text.at))
                text.at++;
        while (text.at < text.past && is_blank(text.past[-1]))
                text.past--;
        return text;
}

/* Reads at least `least` and at most `most` digits, which no digit follows. */
static int read_digits(text_t *text, int least, int most, int64_t *value) {
        int count;
        *value = 0;
        for (count = 0; text->at < text->past && is_digit(*text->at); count++)
                if (count < most)
                        *value = *value * 10 + (*text->at++ - '0');
                else
                        return 0;
        return count >= least;
}

static int read_byte(text_t *text, uint8_t byte) {
        if (text->at == text->past || *text->at != byte)
                return 0;
        text->at++;
        return 1;
}

/* Reads yyyy, yyyy-mm or yyyy-mm-dd. `parts`: how many of the three there were. */
static int read_date(text_t *text, int year_digits, int64_t *days, int *parts) {
        int64_t year, month = 1, day = 1;
        int is_negative = read_byte(text, '-');
        if (!is_negative)
                read_byte(text, '+');
        if (!read_digits(text, 4, year_digits, &year))
                return 0;
        if (is_negative)
                year = -year;
        *parts = 1;
        if (read_byte(text, '-')) {
                if (!read_digits(text, 1, 2, &month))
                        return 0;
                *parts = 2;
                if (read_byte(text, '-')) {
                        if (!read_digits(text, 1, 2, &day))
                                return 0;
                        *parts = 3;
                }
        }
        *days = days_of(year, month, day);
        return is_date(year, month, day);
}

static int to_date(text_t text, int32_t *value) {
        int64_t days;
        int parts;
        text = trimmed(text);
        if (!read_date(&text, 7, &days, &parts) || days < INT32_MIN || days > INT32_MAX)
                return 0;
        if (text.at < text.past && (parts < 3 || (*text.at != ' ' && *text.at != 'T')))
                return 0;
        *value = (int32_t)days;
        return 1;
}

/* Reads an offset of a time zone in seconds: Z, ±h, ±hh:mm, ±hhmm, ±hh:mm:ss, also behind UTC, GMT or UT. */
static int read_zone(text_t text, int64_t *offset) {
        int64_t hours, minutes = 0, seconds = 0;
        int is_negative, has_prefix = 0;
        const uint8_t *start;

        text = trimmed(text);
        if (text.past - text.at == 1 && *text.at == 'Z') {
                *offset = 0;
                return 1;
        }
        if (text.past - text.at >= 3 && (is_word(text.at, "UTC", 3) || is_word(text.at, "GMT", 3)))
                has_prefix = 3;
        else if (text.past - text.at >= 2 && is_word(text.at, "UT", 2))
                has_prefix = 2;
        text.at += has_prefix;
        if (has_prefix && text.at == text.past) {
                *offset = 0;
                return 1;
        }
        is_negative = read_byte(&text, '-');
        if (!is_negative && !read_byte(&text, '+'))
                return 0;
        start = text.at;
        if (!read_digits(&text, 1, 6, &hours))
                return 0;
        switch (text.at - start) {
        case 1:
        case 2:
                if (read_byte(&text, ':')) {
                        start = text.at;
                        if (!read_digits(&text, 1, 2, &minutes))
                                return 0;
                        if (text.at - start == 1 && text.at < text.past)
                                return 0;
                        if (read_byte(&text, ':') && !read_digits(&text, 2, 2, &seconds))
                                return 0;
                }
                break;
        case 4:
                minutes = hours % 100;
                hours /= 100;
                break;
        case 6:
                seconds = hours % 100;
                minutes = hours / 100 % 100;
                hours /= 10000;
                break;
        default:
                return 0;
        }
        if (text.at != text.past || minutes > 59 || seconds > 59)
                return 0;
        *offset = hours * 3600 + minutes * 60 + seconds;
        if (*offset > 18 * 3600)
                return 0;
        if (is_negative)
                *offset = -*offset;
        return 1;
}

/* Seconds of 400 years of the Gregorian calendar, after which the rules of a time zone repeat. */
#define CYCLE (INT64_C(146097) * 86400)
/* 2438-01-01, up to which the table of the time zone goes. */
#define ZONE_END (INT64_C(170935) * 86400)

/* A time zone: local times, in seconds, from which the next offset is in force. decode.py makes it. */
typedef struct {
        const int64_t *turns, *offsets;
        int64_t count;
} zone_t;

/* Returns the offset that is in force at a local time; of two, the earlier one, as in Java. */
static int64_t zone_offset(const zone_t *zone, int64_t local) {
        int64_t low = 0, high = zone->count;
        if (local >= ZONE_END)
                local -= ((local - ZONE_END) / CYCLE + 1) * CYCLE;
        while (low < high) {
                int64_t middle = (low + high) / 2;
                if (zone->turns[middle] <= local)
                        low = middle + 1;
                else
                        high = middle;
        }
        return zone->offsets[low];
}

/* Reads a time as Spark's cast of a string to a timestamp; without a time zone, `zone` is NULL. */
static int to_timestamp(text_t text, const zone_t *zone, int64_t *value) {
        int64_t days, hour = 0, minute = 0, second = 0, micros = 0, seconds, offset = 0;
        int parts, has_offset = 0;

        text = trimmed(text);
        if (!read_date(&text, 6, &days, &parts))
                return 0;
        if (text.at < text.past) {
                if (parts < 3 || (!read_byte(&text, ' ') && !read_byte(&text, 'T')))
                        return 0;
                if (!read_digits(&text, 1, 2, &hour))
                        return 0;
                if (read_byte(&text, ':')) {
                        if (!read_digits(&text, 1, 2, &minute))
                                return 0;
                        if (read_byte(&text, ':')) {
                                if (!read_digits(&text, 1, 2, &second))
                                        return 0;
                                if (read_byte(&text, '.')) {
                                        int64_t unit = 100000;
                                        for (; text.at < text.past && is_digit(*text.at); text.at++, unit /= 10)
                                                micros += (*text.at - '0') * unit;
                                }
                                if (text.at < text.past) {
                                        if (!zone || !read_zone(text, &offset))
                                                return 0;
                                        has_offset = 1;
                                        text.at    = text.past;
                                }
                        }
                }
                if (text.at < text.past || hour > 23 || minute > 59 || second > 59)
                        return 0;
        }
        seconds = days * 86400 + hour * 3600 + minute * 60 + second;
        if (zone)
                seconds -= has_offset ? offset : zone_offset(zone, seconds);
        if (seconds > 9223372036854 || (seconds == 9223372036854 && micros > 775807) || seconds < -9223372036855 ||
            (seconds == -9223372036855 && micros < 224192))
                return 0;
        *value = seconds < 0 ? (seconds + 1) * 1000000 + (micros - 1000000) : seconds * 1000000 + micros;
        return 1;
}

/* Decodes base64 with padding, at most three bytes for four of the text. Returns -1 if it is none. */
static int64_t from_base64(text_t text, uint8_t *to) {
        uint8_t *start = to;
        while (text.at < text.past) {
                uint32_t bits = 0;
                int taken;
                if (*text.at <= ' ') { /* between groups of four */
                        text.at++;
                        continue;
                }
                if (text.past - text.at < 4)
                        return -1;
                for (taken = 0; taken < 4; taken++) {
                        uint8_t byte = text.at[taken];
                        uint32_t six;
                        if (byte >= 'A' && byte <= 'Z')
                                six = byte - 'A';
                        else if (byte >= 'a' && byte <= 'z')
                                six = byte - 'a' + 26u;
                        else if (is_digit(byte))
                                six = byte - '0' + 52u;
                        else if (byte == '+')
                                six = 62;
                        else if (byte == '/')
                                six = 63;
                        else
                                break;
                        bits = bits << 6 | six;
                }
                if (taken == 4) {
                        *to++ = (uint8_t)(bits >> 16);
                        *to++ = (uint8_t)(bits >> 8);
                        *to++ = (uint8_t)bits;
                        text.at += 4;
                        continue;
                }
                if (taken < 2 || text.at[3] != '=' || text.at[taken] != '=')
                        return -1;
                if (taken == 3) {
                        *to++ = (uint8_t)(bits >> 10);
                        *to++ = (uint8_t)(bits >> 2);
                } else {
                        *to++ = (uint8_t)(bits >> 4);
                }
                for (text.at += 4; text.at < text.past; text.at++) /* nothing may follow */
                        if (*text.at > ' ')
                                return -1;
        }
        return to - start;
}

#endif
