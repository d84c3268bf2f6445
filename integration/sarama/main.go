// Writes records with sarama: main BROKER TOPIC COUNT. Each codec writes COUNT records to partition 0 in batches.
package main

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/IBM/sarama"
)

func main() {
	broker, topic := os.Args[1], os.Args[2]
	count, _ := strconv.Atoi(os.Args[3])
	codecs := []sarama.CompressionCodec{sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy, sarama.CompressionLZ4, sarama.CompressionZSTD}
	for _, codec := range codecs {
		config := sarama.NewConfig()
		config.Version = sarama.V2_8_0_0
		config.Producer.Compression = codec
		config.Producer.Return.Successes = true
		config.Producer.Flush.Messages = 40
		config.Producer.Flush.Frequency = 50 * time.Millisecond
		config.Producer.Partitioner = sarama.NewManualPartitioner
		producer, err := sarama.NewAsyncProducer([]string{broker}, config)
		if err != nil {
			panic(err)
		}
		go func() {
			for number := 0; number < count; number++ {
				message := &sarama.ProducerMessage{
					Topic: topic, Partition: 0,
					Value:     sarama.StringEncoder(fmt.Sprintf("%s %d", codec, number)),
					Timestamp: time.UnixMilli(int64(1700000000000 + (number*7919)%1000)),
					Headers:   []sarama.RecordHeader{{Key: []byte("é"), Value: []byte(strconv.Itoa(number))}, {Key: []byte("é"), Value: nil}},
				}
				if number%3 != 0 {
					message.Key = sarama.StringEncoder(codec.String())
				}
				producer.Input() <- message
			}
		}()
		for done := 0; done < count; done++ {
			select {
			case <-producer.Successes():
			case err := <-producer.Errors():
				panic(err)
			}
		}
		producer.Close()
	}
}
