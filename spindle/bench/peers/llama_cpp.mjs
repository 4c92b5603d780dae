// llama.cpp as a peer, through node-llama-cpp: `node llama_cpp.mjs PACKAGE-DIRECTORY`.
//
// A line of JSON in, a line of JSON out (process.py says which). Each seat is a sequence of one
// context; whoever waits takes the seat that becomes free. llama.cpp is as it was built: nothing is
// compiled and nothing is downloaded.

import {readFileSync} from "node:fs";
import {join} from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const packageDirectory = process.argv[2];
const about = JSON.parse(readFileSync(join(packageDirectory, "package.json"), "utf8"));
const complaints = new Set(); // of llama.cpp itself
let context, seats;

// Keys, values and scores in float32; by itself it has them in float16, on a CPU too.
const FLOAT32 = {
    flashAttention: false,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32",
};

async function load({model, float32, threads, seats: count, max_len, max_prompt}) {
    const {getLlama} = await import(pathToFileURL(join(packageDirectory, about.main)).href);
    const llama = await getLlama({
        gpu: false,
        build: "never",
        skipDownload: true,
        maxThreads: 0, // no limit above the context's own number
        logger: (level, message) => {
            if (level === "error" || level === "fatal")
                complaints.add(message.trim());
        },
    });
    const loaded = await llama.loadModel({modelPath: model});
    context = await loaded.createContext({
        sequences: count,
        contextSize: max_len,
        batchSize: Math.max(512, count * (max_prompt + 1)),
        threads: {ideal: threads, min: threads},
        ...(float32 ? FLOAT32 : {}),
    });
    seats = Array.from({length: count}, () => context.getSequence());
    const release = llama.llamaCppRelease?.release ?? "of unknown release";
    return {version: `node-llama-cpp ${about.version}, llama.cpp ${release}`};
}

async function run(requests) {
    for (const seat of seats)
        await seat.clearHistory();

    const start = performance.now();
    const ids = requests.map(() => []);
    const first_s = requests.map(() => 0);
    let next = 0;

    async function serve(seat) {
        while (next < requests.length) {
            const which = next++;
            const [prompt, wanted] = requests[which];
            await seat.clearHistory();
            for await (const token of seat.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
                if (ids[which].push(token) === 1)
                    first_s[which] = (performance.now() - start) / 1e3;
                if (ids[which].length >= wanted)
                    break;
            }
        }
    }

    await Promise.all(seats.map(serve));
    const seconds = (performance.now() - start) / 1e3;
    return {ids, first_s, seconds, peak_bytes: process.resourceUsage().maxRSS * 1024};
}

// Ends in the middle of a run, too, when the parent was killed and can end nobody.
const parent = process.ppid;
setInterval(() => process.ppid === parent || process.exit(1), 1000).unref();

for await (const line of createInterface({input: process.stdin})) {
    const message = JSON.parse(line);
    let answer;
    try {
        answer = {reply: message.load ? await load(message.load) : await run(message.run)};
    } catch (error) {
        answer = {error: [String(error), ...complaints].join(" / ")};
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
}
process.exit(0);
