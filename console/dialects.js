// How each dialect asks, and what its answers say; pure.

const tools = (text) => (text.trim() ? JSON.parse(text) : undefined);
const numbers = ({ temperature, seed }) => ({
  temperature: temperature === "" ? undefined : Number(temperature),
  seed: seed === "" ? undefined : Number(seed),
});
const most = (it) => Number(it.most) || 256;
const told = (it) => (it.system ? [{ role: "system", content: it.system }] : []);
const textOf = (parts) => (Array.isArray(parts) ? parts.map((part) => part.text || "").join("") : "");
const user = (it) => ({ role: "user", content: it.prompt });

export const DIALECTS = {
  chat: {
    name: "Chat completions",
    path: "chat/completions",
    body: (it) => ({
      messages: [...told(it), user(it)], max_tokens: most(it), ...numbers(it), tools: tools(it.tools),
      stream_options: it.stream ? { include_usage: true } : undefined,
    }),
    text: (it) => it.choices?.map((choice) => (choice.delta || choice.message)?.content || "").join(""),
    calls: (it) => (it.choices || []).flatMap((choice) => (choice.delta || choice.message)?.tool_calls || [])
      .map((call) => ({ at: call.index ?? call.id, name: call.function?.name, part: call.function?.arguments || "" })),
    end: (it) => it.choices?.[0]?.finish_reason,
    usage: (it) => it.usage && [it.usage.prompt_tokens, it.usage.completion_tokens],
  },
  completions: {
    name: "Completions",
    path: "completions",
    body: (it) => ({
      prompt: it.prompt, max_tokens: most(it), ...numbers(it),
      stream_options: it.stream ? { include_usage: true } : undefined,
    }),
    text: (it) => it.choices?.map((choice) => choice.text || "").join(""),
    calls: () => [],
    end: (it) => it.choices?.[0]?.finish_reason,
    usage: (it) => it.usage && [it.usage.prompt_tokens, it.usage.completion_tokens],
  },
  responses: {
    name: "Responses",
    path: "responses",
    // Nothing of a trial is kept.
    body: (it) => ({
      input: it.prompt, instructions: it.system || undefined, max_output_tokens: most(it), store: false,
      temperature: numbers(it).temperature, tools: tools(it.tools),
    }),
    text: (it) => {
      if (it.type === "response.output_text.delta") return it.delta;
      return it.object === "response" ? (it.output || []).map((item) => textOf(item.content)).join("") : "";
    },
    calls: (it) => {
      if (it.type === "response.function_call_arguments.delta") return [{ at: it.item_id, part: it.delta }];
      const added = it.type === "response.output_item.added" ? [it.item] : it.object === "response" ? it.output : [];
      return (added || []).filter((item) => item.type === "function_call")
        .map((item) => ({ at: item.id, name: item.name, part: item.arguments || "" }));
    },
    end: (it) => (it.response || it).status,
    usage: (it) => {
      const found = (it.response || it).usage;
      return found && [found.input_tokens, found.output_tokens];
    },
  },
  messages: {
    name: "Messages",
    path: "messages",
    body: (it) => ({
      messages: [user(it)], system: it.system || undefined, max_tokens: most(it),
      temperature: numbers(it).temperature, tools: tools(it.tools),
    }),
    text: (it) => it.delta?.text || textOf(it.content),
    calls: (it) => {
      if (it.delta?.partial_json !== undefined) return [{ at: it.index, part: it.delta.partial_json }];
      if (it.content_block?.type === "tool_use") return [{ at: it.index, name: it.content_block.name, part: "" }];
      return (Array.isArray(it.content) ? it.content : []).filter((part) => part.type === "tool_use")
        .map((part) => ({ at: part.id, name: part.name, part: JSON.stringify(part.input) }));
    },
    end: (it) => it.delta?.stop_reason || it.stop_reason,
    usage: (it) => {
      const found = it.usage || it.message?.usage;
      return found && [found.input_tokens, found.output_tokens];
    },
  },
};

export const asked = (dialect, model, form) =>
  JSON.stringify({ model, ...DIALECTS[dialect].body(form), stream: form.stream || undefined });

// The same request for a shell; its key stays a variable.
export const curl = (dialect, model, form) => {
  const body = JSON.stringify(JSON.parse(asked(dialect, model, form)), null, 1).replaceAll("'", "'\\''");
  return [
    `curl -N "$OPENAI_BASE_URL/${DIALECTS[dialect].path}"`,
    `-H "Authorization: Bearer $OPENAI_API_KEY"`,
    `-H "Content-Type: application/json"`,
    `-d '${body}'`,
  ].join(" \\\n  ");
};

export const nothing = () => ({ text: "", calls: {}, end: "", usage: null, problem: "" });

// The state after one more event, or after a whole answer.
export function heard(state, dialect, event) {
  const of = DIALECTS[dialect];
  const calls = { ...state.calls };
  for (const { at, name, part } of of.calls(event)) {
    const known = calls[at] || { name: "", text: "" };
    calls[at] = { name: name || known.name, text: known.text + part };
  }
  const usage = of.usage(event);
  const error = event.error || (event.type === "error" ? event : null);
  return {
    text: state.text + (of.text(event) || ""),
    calls,
    end: of.end(event) || state.end,
    // A stream may tell its parts one after another.
    usage: usage ? usage.map((it, at) => it ?? state.usage?.[at]) : state.usage,
    problem: error ? error.message || "failed" : state.problem,
  };
}

// Lines of server-sent events -> what was said, without the mark of the end.
export function events(text) {
  return text.split(/\r?\n\r?\n/).flatMap((block) => {
    const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
    const whole = data.join("\n");
    return !whole || whole === "[DONE]" ? [] : [JSON.parse(whole)];
  });
}
