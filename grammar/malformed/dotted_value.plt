train {
  optimizer = torch.optim.Adam
}
