/* Lists and decodes record batches as a reader does, under libFuzzer. Compiled by `./dev fuzz`. */
#include "kafka_eos_source/native/kernel.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        static batch_t batches[64];
        records_t      records[64];
        block_t       *block;
        int64_t        count, index, checks;

        if (size < 2)
                return 0;
        checks = data[0] & 1;
        count  = kafka_eos_list(data + 2, (int64_t)size - 2, (int32_t)checks, batches, 64);
        if (count < 0)
                return 0;
        if (count > 63)
                count = 63;
        memset(records, 0, sizeof(records));
        for (index = 0; index < count; index++) {
                if (batches[index].magic != 2 || !batches[index].is_intact || batches[index].bytes < 61)
                        break;
                records[index].at           = data + 2 + batches[index].at + 61;
                records[index].bytes        = batches[index].bytes - 61;
                records[index].first_offset = batches[index].first_offset;
                records[index].past_offset  = batches[index].past_offset;
                records[index].first_ms     = batches[index].first_ms;
                records[index].append_ms    = data[1] & 32 ? batches[index].max_ms : -1;
                records[index].count        = batches[index].count;
        }
        block = kafka_eos_decode(records, index, data[1] & 31);
        if (block)
                kafka_eos_free(block);
        return 0;
}
