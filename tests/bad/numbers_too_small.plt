import "base/gpt.plt"

model {
  adapter = lora(rank = 0, targets = ["qkv"]) #! E0125
}

data {
  documents = true #! E0121
}
