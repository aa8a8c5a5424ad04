"""Training scripts of others, on small models and with nothing changed but the line that wraps: each is run by torch in one
process that has all the data, or by torch DDP, and by shardstep on two ranks."""

import contextlib
import copy

import pytest
import ranks
import shardstep
import torch
import torch.nn.functional as F
from torch import nn

FORMS = ["wrap", "class", "replicated"]
every_form = pytest.mark.parametrize("form", FORMS)


def attach(form, model, optimizer, **options):
    """(what the script calls ``model`` from then on, its optimizer)"""
    if form == "ddp":
        return nn.parallel.DistributedDataParallel(model), optimizer
    if form == "wrap":
        return shardstep.wrap(model, optimizer, timeout=30.0, **options)
    called = shardstep.DistributedDataParallel(model, timeout=30.0)
    return called, shardstep.ShardedOptimizer(optimizer, called) if form == "class" else optimizer


def seeded(*numbers):
    return torch.Generator().manual_seed(sum(1000**k * n for k, n in enumerate(numbers)))


def assert_equal_training(reference, model, rtol=1e-4, atol=2e-5):
    """Adam's first steps move a weight by lr however small its gradient is, so rounding of the smallest ones shows."""
    for (name, a), (_, b) in zip(reference.named_parameters(), model.named_parameters()):
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


# -- transformers -----------------------------------------------------------------------------------------------------


def language_model(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, pad_token_id=0))


def tokens(step, k, rank):
    batch = torch.randint(1, 61, (2, 9), generator=seeded(step, k, rank))
    return {"input_ids": batch, "attention_mask": torch.ones_like(batch), "labels": batch}


def train_language_model(model, optimizer, shares, steps=3, micro_batches=2):
    """The usual loop, over this process's share of the ranks' data."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    losses = []
    for step in range(steps):
        for k in range(micro_batches):
            last = k + 1 == micro_batches
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                for rank in shares:
                    loss = model(**tokens(step, k, rank)).loss / (micro_batches * len(shares))
                    loss.backward()
                    losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def language_model_body(rank, world, form, tied):
    reference, model = language_model(tied), language_model(tied)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    train_language_model(reference, adamw[0], range(world))
    if form == "wrap":
        model.gradient_checkpointing_enable()
    called, optimizer = attach(form, model, adamw[1])
    train_language_model(called, optimizer, [rank])
    assert_equal_training(reference, model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    user = called if form == "wrap" else called.module
    assert type(user).__name__ == "LlamaForCausalLM"
    prompt = tokens(9, 0, 0)["input_ids"][:, :4]
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    called.eval(), reference.eval()
    text = user.generate(prompt, **options)
    assert text.shape == (2, 10) and torch.equal(text, reference.generate(prompt, **options))
    return text.tolist()


@every_form
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_language_model_trains_and_generates(form, tied):
    first, second = ranks.run(2, language_model_body, form, tied)
    assert first == second


def saved_body(rank, world, folder):
    """save_pretrained of a model in training writes what from_pretrained of the plain class reads."""
    from transformers import LlamaForCausalLM

    model = language_model()
    model, optimizer = attach("wrap", model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_language_model(model, optimizer, [rank], steps=1)
    if rank == 0:
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    torch.distributed.barrier()
    train_language_model(model, optimizer, [rank], steps=1)


def test_transformers_saves_a_wrapped_model(tmp_path):
    ranks.run(2, saved_body, str(tmp_path))


# -- peft -------------------------------------------------------------------------------------------------------------


def lora_model(base_dtype):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        language_model().to(base_dtype),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for n, (name, p) in enumerate(model.named_parameters()):
        if "lora_B" in name:  # zeros, which would hide half of the gradients
            nn.init.normal_(p, std=0.1, generator=seeded(n))
    return model


def lora_body(rank, world, form, base_dtype):
    torch.manual_seed(0)
    reference = lora_model(base_dtype)
    model = copy.deepcopy(reference)
    base = model.base_model.model.lm_head.weight.clone()
    adamw = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (reference, model)]
    train_language_model(reference, adamw[0], range(world))
    called, optimizer = attach(form, model, adamw[1])
    train_language_model(called, optimizer, [rank])
    adapters = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in adapters)
    assert {p.dtype for p in adapters} == {torch.float32} and numel == 2 * 4 * (16 + 16 + 16 + 8)
    tolerance = dict() if base_dtype == torch.float32 else dict(rtol=0.05, atol=2e-3)
    assert_equal_training(reference, model, **tolerance)
    assert torch.equal(model.base_model.model.lm_head.weight, base)
    if form != "replicated":  # nothing of the base is in the layout
        memory = called.stats()["memory"]
        assert memory["grads"] == memory["params"] == 4 * numel and memory["optimizer"] < 2 * 4 * numel
    user = called if form == "wrap" else called.module
    prompt = tokens(9, 0, 0)["input_ids"]
    with torch.no_grad():
        with user.disable_adapter():
            plain = user(prompt).logits
        assert not torch.equal(plain, user(prompt).logits)
    train_language_model(called, optimizer, [rank], steps=1)
    return [p.sum().item() for p in adapters]


@pytest.mark.parametrize("form, base_dtype", [
    ("wrap", torch.float32), ("wrap", torch.bfloat16), ("class", torch.float32), ("replicated", torch.bfloat16)])
def test_lora_with_peft_trains_the_adapters_only(form, base_dtype):
    first, second = ranks.run(2, lora_body, form, base_dtype)
    assert first == second


# -- a residual network -----------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + identity, inplace=True)


class ResNet(nn.Module):
    def __init__(self, widths=(8, 16), classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(True))
        self.layers = nn.Sequential(BasicBlock(widths[0], widths[0]), BasicBlock(widths[0], widths[1], 2))
        self.fc = nn.Linear(widths[1], classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1), 1))


def resnet_body(rank, world, form, channels_last):
    torch.manual_seed(0)
    reference = ResNet()
    if channels_last:
        reference = reference.to(memory_format=torch.channels_last)
    model = copy.deepcopy(reference)
    results = []
    for which, m in (("ddp", reference), (form, model)):
        decay = [p for p in m.parameters() if p.ndim > 1]
        others = [p for p in m.parameters() if p.ndim <= 1]
        sgd = torch.optim.SGD([{"params": decay, "weight_decay": 1e-2}, {"params": others}], lr=0.05, momentum=0.9)
        called, optimizer = attach(which, m, sgd)
        called.train()
        for step in range(3):
            images = torch.randn(4, 3, 8, 8, generator=seeded(step, rank))
            if channels_last:
                images = images.to(memory_format=torch.channels_last)
            labels = torch.randint(0, 5, (4,), generator=seeded(step, rank))
            optimizer.zero_grad()
            F.cross_entropy(called(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
        called.eval()
        with torch.no_grad():
            images = torch.randn(4, 3, 8, 8, generator=seeded(99))
            results.append(called(images))
    for a, b in zip(reference.parameters(), model.parameters()):
        assert torch.equal(a, b), (a - b).abs().max()
    if form != "wrap" or rank == 0:  # DDP's buffers are rank 0's at the next forward only; ours are with the step
        return [b.tolist() for b in model.buffers()] == [b.tolist() for b in reference.buffers()], results[1].tolist()
    return None, results[1].tolist()


@every_form
@pytest.mark.parametrize("channels_last", [False, True])
def test_residual_network_with_batchnorm_has_the_bits_of_ddp(form, channels_last):
    (same, mine), (_, theirs) = ranks.run(2, resnet_body, form, channels_last)
    assert same
    if form != "replicated":
        assert mine == theirs  # evaluated alike on all ranks


# -- recurrence -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 10, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.out = nn.Linear(20, 4)

    def forward(self, words, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)
        return self.out(hidden)


def tagger_body(rank, world, form):
    torch.manual_seed(0)
    reference = Tagger()
    model = copy.deepcopy(reference)
    flat = list(model.lstm._flat_weights)
    for which, m in (("ddp", reference), (form, model)):
        called, optimizer = attach(which, m, torch.optim.SGD(m.parameters(), lr=0.1))
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            lengths = torch.randint(2, 7, (3,))
            words = torch.randint(1, 30, (3, int(lengths.max())))
            called(words, lengths).logsumexp(-1).mean().backward()
            torch.nn.utils.clip_grad_value_(called.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert all(a is b for a, b in zip(model.lstm._flat_weights, flat))
    for a, b in zip(reference.parameters(), model.parameters()):
        assert torch.equal(a, b), (a - b).abs().max()


@every_form
def test_lstm_over_packed_sequences_has_the_bits_of_ddp(form):
    ranks.run(2, tagger_body, form)


# -- a GAN ------------------------------------------------------------------------------------------------------------


def dcgan(netG, netD, optimizerG, optimizerD, shares, steps=4):
    """The loop of torch's DCGAN example: the discriminator's gradients of the generator's step are thrown away by
    ``zero_grad`` of the module."""
    criterion = nn.BCEWithLogitsLoss()
    for step in range(steps):
        netD.zero_grad()
        parts = []
        for rank in shares:
            real = torch.randn(6, 4, generator=seeded(step, rank)) + 1
            noise = torch.randn(6, 3, generator=seeded(step, rank, 1))
            (criterion(netD(real), torch.ones(6, 1)) / len(shares)).backward()
            fake = netG(noise)
            (criterion(netD(fake.detach()), torch.zeros(6, 1)) / len(shares)).backward()
            parts.append(fake)
        optimizerD.step()
        netG.zero_grad()
        for fake in parts:
            (criterion(netD(fake), torch.ones(6, 1)) / len(shares)).backward()
        optimizerG.step()


def gan_body(rank, world, form):
    def nets():
        torch.manual_seed(0)
        return (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
                nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))

    reference, mine = nets(), nets()
    dcgan(*reference, *(torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in reference), range(world))
    pairs = [attach(form, m, torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999))) for m in mine]
    (netG, optimizerG), (netD, optimizerD) = pairs
    dcgan(netG, netD, optimizerG, optimizerD, [rank])
    for a, b in zip(reference, mine):
        assert_equal_training(a, b)


@every_form
def test_dcgan_loop_equals_one_process(form):
    ranks.run(2, gan_body, form)
