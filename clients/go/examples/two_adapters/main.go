// Command two_adapters asks two adapters the same question at once, then lists the slots of the device.
//
//	two_adapters -first legal-brief -second creative-story "What is the sea like?"
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"

	"google.golang.org/grpc"

	deltaplanev1 "github.com/deltaplane/deltaplane/clients/go/deltaplane/v1"
)

var (
	address      = flag.String("address", "localhost:50051", "host:port of the data plane")
	adminAddress = flag.String("admin-address", "localhost:50052", "host:port of the control plane")
	first        = flag.String("first", "legal-brief", "one adapter")
	second       = flag.String("second", "creative-story", "the other adapter")
	maxTokens    = flag.Uint("max-tokens", 48, "the most tokens of each stream")
)

func main() {
	flag.Parse()
	question := "What is the sea like?"
	if flag.NArg() > 0 {
		question = flag.Arg(0)
	}
	if err := run(context.Background(), question); err != nil {
		fmt.Fprintln(os.Stderr, "two_adapters:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, question string) error {
	connection, err := grpc.DialContext(ctx, *address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	client := deltaplanev1.NewGenerationServiceClient(connection)

	adapters := []string{*first, *second}
	failures := make([]error, len(adapters))
	var streams sync.WaitGroup
	for i, adapter := range adapters {
		streams.Add(1)
		go func(i int, adapter string) {
			defer streams.Done()
			failures[i] = stream(ctx, client, adapter, question)
		}(i, adapter)
	}
	streams.Wait()
	for _, err := range failures {
		if err != nil {
			return err
		}
	}
	return listSlots(ctx)
}

func stream(ctx context.Context, client deltaplanev1.GenerationServiceClient, adapter, question string) error {
	greedy, limit := float32(0), uint32(*maxTokens)
	responses, err := client.Generate(ctx, &deltaplanev1.GenerateRequest{
		Adapter: adapter,
		Prompt: &deltaplanev1.GenerateRequest_Messages{Messages: &deltaplanev1.ChatMessages{
			Messages: []*deltaplanev1.ChatMessage{{Role: "user", Content: question}},
		}},
		Sampling: &deltaplanev1.SamplingParams{Temperature: &greedy},
		Stop:     &deltaplanev1.StopCondition{MaxTokens: &limit},
	})
	if err != nil {
		return err
	}
	for {
		response, err := responses.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if response.Text != "" {
			fmt.Printf("%s: %q\n", adapter, response.Text)
		}
		if response.Finish != nil {
			fmt.Printf("%s finished: %s\n", adapter, response.Finish.Reason)
		}
		if response.Usage != nil {
			fmt.Printf("%s tokens: %d\n", adapter, response.Usage.CompletionTokens)
		}
	}
}

func listSlots(ctx context.Context) error {
	connection, err := grpc.DialContext(ctx, *adminAddress, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	answer, err := deltaplanev1.NewAdapterServiceClient(connection).ListSlots(ctx, &deltaplanev1.ListSlotsRequest{})
	if err != nil {
		return err
	}
	for _, slot := range answer.Slots {
		if slot.Adapter == "" {
			fmt.Printf("slot %d: free\n", slot.Slot)
		} else {
			fmt.Printf("slot %d: %s version %d\n", slot.Slot, slot.Adapter, slot.Version)
		}
	}
	return nil
}
